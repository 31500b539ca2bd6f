//! Rows of a table, and sums of rows into one.

use super::par_rows;

/// The first of `ids` that is not in `lowest..count`, with its position.
pub(crate) fn outside(ids: &[i32], lowest: i32, count: usize) -> Option<(usize, i32)> {
    ids.iter().copied().enumerate().find(|&(_, id)| id < lowest || id >= 0 && id as usize >= count)
}

/// y[i] = table[ids[i]], rows of `d`. The ids are inside the table.
pub(crate) fn gather<T: Copy + Send + Sync>(table: &[T], ids: &[i32], y: &mut [T], d: usize) {
    par_rows(y, d, d, |first, y| {
        for (y, &id) in y.chunks_exact_mut(d).zip(&ids[first..]) {
            y.copy_from_slice(&table[id as usize * d..][..d]);
        }
    });
}

/// table[ids[i]] += dy[i]. Each thread looks through all ids for its range of the table's rows.
pub(crate) fn scatter(dy: &[f32], ids: &[i32], table: &mut [f32], d: usize) {
    if table.is_empty() {
        return;
    }
    let cost = dy.len().div_ceil(table.len() / d) + d;
    par_rows(table, d, cost, |first, rows| {
        let own = first..first + rows.len() / d;
        simd!({
            for (&id, dy) in ids.iter().zip(dy.chunks_exact(d)) {
                if own.contains(&(id as usize)) {
                    let row = &mut rows[(id as usize - first) * d..][..d];
                    row.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy);
                }
            }
        });
    });
}
