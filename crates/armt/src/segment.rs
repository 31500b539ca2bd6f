//! Cutting a batch of texts into segments, with what each segment needs beside its tokens.
//!
//! All segments of a text have one width, so that layers of different segments can run together: a short one is padded at its left, where
//! padding is hidden as keys. Positions, learned or rotary, are those of the segment without its padding.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// How a text is cut into segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Alignment {
    /// From the start; the last segment may be short.
    #[default]
    Left,
    /// From the end; the first segment may be short.
    Right,
    /// Into pieces of nearly equal length.
    Center,
}

/// Where the segments of a text of `tokens` tokens lie.
pub fn cut(tokens: usize, size: usize, alignment: Alignment) -> Vec<Range<usize>> {
    let from = |starts: Vec<usize>| {
        let ends: Vec<usize> = starts.iter().skip(1).copied().chain([tokens]).collect();
        starts.into_iter().zip(ends).map(|(a, b)| a..b).collect()
    };
    match alignment {
        Alignment::Left => from((0..tokens).step_by(size).collect()),
        Alignment::Right => {
            let short = tokens % size;
            let first = if short > 0 { vec![0] } else { vec![] };
            from(first.into_iter().chain((short..tokens).step_by(size)).collect())
        }
        Alignment::Center => {
            let piece = tokens.div_ceil(tokens.div_ceil(size).max(1)).max(1);
            from((0..tokens).step_by(piece).collect())
        }
    }
}

/// A batch of texts of equal length, `[texts, tokens]`, with an optional mask of padding.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Token ids, row by row.
    pub ids: Vec<i32>,
    /// Texts.
    pub texts: usize,
    /// 0 where a token is padding, row by row. `None`: nothing is.
    pub mask: Option<Vec<i32>>,
}

impl Batch {
    /// A batch from rows of ids. Rows of different length are padded at their right and the padding masked.
    pub fn from_rows(rows: &[Vec<i32>]) -> Result<Self> {
        let length = rows.iter().map(Vec::len).max().unwrap_or(0);
        if length == 0 {
            return Err(Error::input("at least one text with at least one token", "none"));
        }
        let even = rows.iter().all(|r| r.len() == length);
        let padded = |row: &Vec<i32>| row.iter().copied().chain(std::iter::repeat(0)).take(length).collect::<Vec<_>>();
        let mask = |row: &Vec<i32>| (0..length).map(|i| i32::from(i < row.len())).collect::<Vec<_>>();
        Ok(Batch {
            ids: rows.iter().flat_map(padded).collect(),
            texts: rows.len(),
            mask: (!even).then(|| rows.iter().flat_map(mask).collect()),
        })
    }

    /// Tokens of each text.
    pub fn tokens(&self) -> usize {
        self.ids.len() / self.texts.max(1)
    }
}

/// One segment of a batch, ready to be embedded: `[texts, width]`, `pad` columns of padding first.
#[derive(Clone, Debug)]
pub struct Segment {
    /// The tokens' range in the text.
    pub range: Range<usize>,
    /// Columns of padding at the left.
    pub pad: usize,
    /// Ids, row by row; 0 where padded.
    pub ids: Vec<i32>,
    /// 0 where hidden, row by row. `None`: nothing is.
    pub mask: Option<Vec<i32>>,
}

impl Segment {
    /// Columns: padding and tokens.
    pub fn width(&self) -> usize {
        self.pad + self.range.len()
    }
}

/// Cuts a batch into segments of at most `size` tokens, all of the width of the longest.
pub fn segments(batch: &Batch, size: usize, alignment: Alignment) -> Result<Vec<Segment>> {
    let tokens = batch.tokens();
    if tokens == 0 {
        return Err(Error::input("at least one token", "none"));
    }
    let ranges = cut(tokens, size, alignment);
    let width = ranges.iter().map(Range::len).max().unwrap_or(0);
    Ok(ranges.into_iter().map(|range| segment(batch, range, width)).collect())
}

/// One range of a batch as a segment of `width` columns.
pub fn segment(batch: &Batch, range: Range<usize>, width: usize) -> Segment {
    let (tokens, pad) = (batch.tokens(), width - range.len());
    // By whole rows: between two groups a GPU waits for this.
    let gather = |source: &[i32]| -> Vec<i32> {
        let mut rows = Vec::with_capacity(batch.texts * width);
        for b in 0..batch.texts {
            rows.extend(std::iter::repeat_n(0, pad));
            rows.extend_from_slice(&source[b * tokens..][range.clone()]);
        }
        rows
    };
    let mask = match &batch.mask {
        Some(mask) => Some(gather(mask)),
        None if pad > 0 => Some(gather(&vec![1; batch.ids.len()])),
        None => None,
    };
    let mask = mask.filter(|m| m.contains(&0));
    Segment { ids: gather(&batch.ids), pad, range, mask }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignment_decides_which_segment_is_short() {
        assert_eq!(cut(10, 4, Alignment::Left), [0..4, 4..8, 8..10]);
        assert_eq!(cut(10, 4, Alignment::Right), [0..2, 2..6, 6..10]);
        assert_eq!(cut(10, 4, Alignment::Center), [0..4, 4..8, 8..10]);
        assert_eq!(cut(9, 4, Alignment::Center), [0..3, 3..6, 6..9]);
        for alignment in [Alignment::Left, Alignment::Right, Alignment::Center] {
            assert_eq!(cut(8, 4, alignment), [0..4, 4..8]);
            assert_eq!(cut(1, 4, alignment), vec![0..1; 1]);
        }
    }

    #[test]
    fn a_short_segment_is_padded_at_its_left_and_masked() {
        let batch = Batch { ids: vec![1, 2, 3, 4, 5, 6], texts: 2, mask: None };
        let s = segments(&batch, 2, Alignment::Left).unwrap();
        assert_eq!((s[0].ids.as_slice(), s[0].mask.as_deref()), ([1, 2, 4, 5].as_slice(), None));
        assert_eq!((s[1].ids.as_slice(), s[1].mask.as_deref()), ([0, 3, 0, 6].as_slice(), Some([0, 1, 0, 1].as_slice())));
        assert_eq!((s[1].pad, s[1].width()), (1, 2));
    }

    #[test]
    fn rows_of_different_length_are_masked() {
        let batch = Batch::from_rows(&[vec![1, 2, 3], vec![4]]).unwrap();
        assert_eq!((batch.ids, batch.mask), (vec![1, 2, 3, 4, 0, 0], Some(vec![1, 1, 1, 1, 0, 0])));
        assert!(Batch::from_rows(&[vec![]]).is_err());
    }
}
