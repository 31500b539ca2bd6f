use super::super::Case;

pub fn cases() -> Vec<Case> {
    Vec::new()
}
