//! Which texts run side by side, where they have different numbers of segments to run.
//!
//! Texts that have as many run together. Of others the largest power of two that fits some of them comes first, with all texts that have as
//! many; then what is left likewise. So 64 texts that all end elsewhere are read in a few runs of many texts, and each has its segments in
//! their order.

/// Runs of some segments of some texts each, for texts that have `segments` each.
pub(super) fn plan(segments: &[usize]) -> Vec<(usize, Vec<usize>)> {
    let mut left = segments.to_vec();
    let mut runs = Vec::new();
    while let Some(most) = left.iter().copied().max().filter(|most| *most > 0) {
        let alike = left.iter().all(|n| *n == 0 || *n == most);
        let run = if alike { most } else { 1 << most.ilog2() };
        let texts: Vec<usize> = (0..left.len()).filter(|text| left[*text] >= run).collect();
        texts.iter().for_each(|text| left[*text] -= run);
        runs.push((run, texts));
    }
    runs
}

/// The places of equal keys, in the order in which the keys first come.
pub(crate) fn alike<K: PartialEq>(keys: impl Iterator<Item = K>) -> Vec<(K, Vec<usize>)> {
    let mut groups: Vec<(K, Vec<usize>)> = Vec::new();
    for (place, key) in keys.enumerate() {
        match groups.iter_mut().find(|(k, _)| *k == key) {
            Some((_, group)) => group.push(place),
            None => groups.push((key, vec![place])),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_has_its_segments_and_few_runs_do() {
        assert_eq!(plan(&[]), []);
        assert_eq!(plan(&[0, 0]), []);
        assert_eq!(plan(&[27]), [(27, vec![0])]);
        assert_eq!(plan(&[7, 0, 7]), [(7, vec![0, 2])]);
        assert_eq!(plan(&[32, 5, 20]), [(32, vec![0]), (16, vec![2]), (4, vec![1, 2]), (1, vec![1])]);
        let many: Vec<usize> = (0..64).map(|i| (i * 37) % 33).collect();
        let runs = plan(&many);
        let of = |text: usize| runs.iter().filter(|(_, texts)| texts.contains(&text)).map(|(n, _)| n).sum::<usize>();
        assert!((0..64).all(|text| of(text) == many[text]));
        assert!(runs.len() <= 6, "{}", runs.len());
    }
}
