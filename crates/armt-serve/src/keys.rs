//! Who asks: keys from a file, compared in constant time, and the clients that memories belong to.

use std::path::Path;

use subtle::{Choice, ConstantTimeEq};

/// Whose a memory is. Of a key it tells nothing that could be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Client(u128);

impl Client {
    /// Everybody, where there are no keys.
    pub const ALL: Client = Client(0);

    fn of(digest: &blake3::Hash) -> Self {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest.as_bytes()[..16]);
        Client(u128::from_le_bytes(bytes))
    }

    /// As files have it.
    pub fn to_text(self) -> String {
        format!("{:032x}", self.0)
    }

    /// Of a file.
    pub fn from_text(text: &str) -> Option<Self> {
        u128::from_str_radix(text, 16).ok().map(Client)
    }
}

/// The keys of a server.
pub struct Keys(Vec<blake3::Hash>);

impl Keys {
    /// Shorter ones could be guessed.
    const SHORTEST: usize = 16;

    /// Reads keys, one a line; lines that are empty or begin with # do not count. A file without a key, or with one that could be guessed,
    /// is an error.
    pub fn load(path: &Path) -> std::io::Result<Self> {
        let text = std::fs::read_to_string(path)?;
        let refuse = |what: String| Err(std::io::Error::new(std::io::ErrorKind::InvalidData, what));
        let mut keys = Vec::new();
        for (line, key) in text.lines().map(str::trim).enumerate().filter(|(_, key)| !key.is_empty() && !key.starts_with('#')) {
            if key.len() < Self::SHORTEST {
                return refuse(format!(
                    "line {}: expected a key of at least {} characters, got {}",
                    line + 1,
                    Self::SHORTEST,
                    key.len()
                ));
            }
            // A header could not bring it.
            if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                return refuse(format!("line {}: expected a key of letters, digits and signs of ASCII, without a space", line + 1));
            }
            keys.push(blake3::hash(key.as_bytes()));
        }
        if keys.is_empty() { refuse("expected a key on a line of its own, got none".into()) } else { Ok(Keys(keys)) }
    }

    /// Whose key it is that an `Authorization` header has. All keys are looked at, whichever it is.
    pub fn client(&self, header: Option<&str>) -> Option<Client> {
        let (scheme, key) = header?.split_once(' ')?;
        let digest = blake3::hash(key.trim().as_bytes());
        let known = self.0.iter().fold(Choice::from(0), |known, own| known | own.as_bytes().ct_eq(digest.as_bytes()));
        (bool::from(known) && scheme.eq_ignore_ascii_case("bearer")).then(|| Client::of(&digest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_known_by_its_whole_and_clients_differ() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let write = |text: &str| std::fs::write(file.path(), text).unwrap();
        write("# ours\n0123456789abcdef\n\n  fedcba9876543210  \n");
        let keys = Keys::load(file.path()).unwrap();
        let first = keys.client(Some("Bearer 0123456789abcdef")).unwrap();
        let second = keys.client(Some("bearer fedcba9876543210")).unwrap();
        assert!(first != second && first != Client::ALL && Client::from_text(&first.to_text()) == Some(first));
        for wrong in
            [None, Some(""), Some("Bearer "), Some("Bearer 0123456789abcde"), Some("Basic 0123456789abcdef"), Some("# ours")]
        {
            assert_eq!(keys.client(wrong), None, "{wrong:?}");
        }
        for (bad, word) in [("", "none"), ("# only words\n", "none"), ("short\n", "line 1"), ("clé-de-ce-serveur-ci\n", "ASCII")] {
            write(bad);
            assert!(Keys::load(file.path()).err().unwrap().to_string().contains(word), "{bad}");
        }
    }
}
