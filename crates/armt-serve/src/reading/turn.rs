//! Whose turn it is: which texts a GPU reads next, where texts are tokenized ahead of it.
//!
//! A GPU reads whole groups of segments, and it reads fast only what it knows: for each new number of texts side by side its products are
//! timed and a graph recorded. So the texts of a turn are a power of two, or as many as are read side by side at most; who is left over is
//! first in the next turn. All have as many groups. And where most of those are missing that were there for the last turns, it waits a little:
//! clients who send a text in pieces are on their way with the next.

/// What a text has to be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// Whole groups.
    pub groups: usize,
    /// Something that is not in the memory, not even as what is open at its end.
    pub some: bool,
    /// Less than a group, and nothing comes after it.
    pub over: bool,
}

/// Who is next.
#[derive(Debug, PartialEq, Eq)]
pub struct Turn {
    /// The places of the texts.
    pub texts: Vec<usize>,
    /// Groups of each; less than one where it is 0.
    pub groups: usize,
    /// How many could have had a turn.
    pub ready: usize,
}

/// How many of so many texts are read side by side.
fn size(texts: usize, most: usize) -> usize {
    if texts >= most { most } else { (texts + 1).next_power_of_two() / 2 }
}

/// Who is next among texts of which at most `most` are read side by side, with at most so many groups. Where others are `expected`, less than
/// half of them are not taken.
pub fn next(waits: &[Waits], most: usize, groups: usize, expected: Option<usize>) -> Option<Turn> {
    let places = |of: fn(&Waits) -> bool| (0..waits.len()).filter(|place| of(&waits[*place])).collect::<Vec<_>>();
    // They cost the device nothing, and their clients are heard of the sooner.
    let over = places(|w| w.over);
    if !over.is_empty() {
        return Some(Turn { texts: over, groups: 0, ready: 0 });
    }
    let mut texts = places(|w| w.groups > 0);
    let ready = texts.len();
    if expected.is_some_and(|expected| 2 * size(ready, most) < size(expected.max(1), most)) {
        return None;
    }
    texts.truncate(size(ready, most));
    let groups = texts.iter().map(|place| waits[*place].groups).min().unwrap_or(0).min(groups);
    texts.extend(places(|w| w.groups == 0 && w.some));
    (!texts.is_empty()).then_some(Turn { texts, groups, ready })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(groups: &[usize]) -> Vec<Waits> {
        groups.iter().map(|groups| Waits { groups: *groups, some: true, over: false }).collect()
    }

    #[test]
    fn turns_are_of_few_sizes_and_of_as_many_groups_for_all() {
        for (ready, taken) in [(1, 1), (2, 2), (3, 2), (7, 4), (47, 32), (48, 48), (50, 48)] {
            let turn = next(&with(&vec![3; ready]), 48, 8, None).unwrap();
            assert_eq!((turn.texts.len(), turn.groups, turn.ready), (taken, 3, ready));
        }
        assert_eq!(next(&with(&[5, 2, 9, 4]), 64, 8, None).unwrap().groups, 2);
        assert_eq!(next(&with(&[50, 20]), 64, 8, None).unwrap().groups, 8);
    }

    #[test]
    fn a_turn_waits_while_most_are_on_their_way_and_then_takes_who_is_there() {
        assert_eq!(next(&with(&[1, 1, 1, 0]), 64, 8, Some(8)), None);
        assert_eq!(
            next(&with(&[1, 1, 1, 0]), 64, 8, None).unwrap().texts,
            [0, 1, 3],
            "what is less than a group is open meanwhile"
        );
        assert_eq!(next(&with(&[1, 1, 1, 1]), 64, 8, Some(8)).unwrap().texts, [0, 1, 2, 3], "half are as good");
        assert_eq!(next(&with(&[1, 1, 1]), 3, 8, Some(100)).unwrap().texts, [0, 1, 2], "more cannot be");
        assert_eq!(next(&with(&[0]), 64, 8, Some(0)), None);
        assert_eq!(next(&[], 64, 8, None), None);
        assert_eq!(next(&[Waits::default()], 64, 8, None), None);
    }

    #[test]
    fn who_is_over_waits_for_nobody() {
        let mut waits = with(&[4, 0, 4]);
        waits[1].over = true;
        assert_eq!(next(&waits, 64, 8, Some(64)), Some(Turn { texts: vec![1], groups: 0, ready: 0 }));
    }
}
