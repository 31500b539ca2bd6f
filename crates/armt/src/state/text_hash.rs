//! What was read, in one number that grows with it: a polynomial of the tokens t over the prime p = 2^61 - 1.
//!
//! ```text
//! h <- h x + t + 1  (mod p)
//! ```
//!
//! It does not depend on where a text is cut into segments or readings, and takes a product a token. Of two texts of n tokens that differ
//! at most n of the p values of x give one number, so that a text is not taken for another by accident; it is no guard against malice.

use std::fmt;
use std::str::FromStr;

const PRIME: u64 = (1 << 61) - 1;
const X: u64 = 0x0b5a_d4ec_eda1_ce2a;

/// A running hash of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextHash(u64);

impl TextHash {
    /// The hash after one more token.
    pub fn after(self, token: i32) -> Self {
        let sum = u128::from(self.0) * u128::from(X) + u128::from(token as u32) + 1;
        // 2^61 is 1 modulo p, so that what is above the 61st bit may be added to what is below.
        let folded = (sum & u128::from(PRIME)) as u64 + (sum >> 61) as u64;
        TextHash(if folded >= PRIME { folded - PRIME } else { folded })
    }

    /// The hash after more tokens.
    pub fn after_all(self, tokens: &[i32]) -> Self {
        tokens.iter().fold(self, |hash, token| hash.after(*token))
    }
}

impl fmt::Display for TextHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl FromStr for TextHash {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let hash = u64::from_str_radix(text, 16).map(TextHash).map_err(|_| ())?;
        // Only what is written is read: a sign or a capital is none of it.
        if hash.0 < PRIME && hash.to_string() == text { Ok(hash) } else { Err(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_polynomial_and_a_text_in_pieces_gives_it_too() {
        let tokens: Vec<i32> = (0..1000).map(|i| (i * 7919) % 50_257).chain([i32::MAX, 0, -1]).collect();
        let p = u128::from(PRIME);
        let naive = tokens.iter().fold(0u128, |h, t| (h * u128::from(X) + u128::from(*t as u32) + 1) % p);
        let whole = TextHash::default().after_all(&tokens);
        assert_eq!(u128::from(whole.0), naive);
        for cut in [0, 1, 500, 1002] {
            assert_eq!(TextHash::default().after_all(&tokens[..cut]).after_all(&tokens[cut..]), whole);
        }
        assert_eq!(whole.to_string().parse(), Ok(whole));
    }

    #[test]
    fn a_changed_a_swapped_and_a_missing_token_give_another() {
        let of = |tokens: &[i32]| TextHash::default().after_all(tokens);
        let all = [of(&[]), of(&[0]), of(&[0, 0]), of(&[1, 2, 3]), of(&[2, 1, 3]), of(&[1, 2, 4]), of(&[1, 2])];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b), "{i}");
        }
        for wrong in ["", "x", "1", "ffffffffffffffff", "+000000000000001"] {
            assert_eq!(wrong.parse::<TextHash>(), Err(()), "{wrong}");
        }
    }
}
