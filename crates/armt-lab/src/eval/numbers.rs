//! Numbers as people write them.

/// 1234567 as 1,234,567.
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let groups: Vec<&str> = digits.as_bytes().rchunks(3).rev().filter_map(|g| std::str::from_utf8(g).ok()).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comma_stands_before_every_three_digits() {
        assert_eq!(["0", "999", "1,000", "50,000,001"], [0, 999, 1000, 50_000_001].map(thousands).each_ref().map(String::as_str));
    }
}
