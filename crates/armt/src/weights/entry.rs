//! Which tensor of a file is which part of which parameter.
//!
//! Ours are stacked over layers and stored `[in, out]`, with queries, keys and values (and gate and up) side by side. Files have one tensor
//! a layer: GPT-2's as `[in, out]`, the other families' as `[out, in]`, GPT-NeoX's queries, keys and values interleaved by head.

use std::ops::Range;
use std::path::Path;

use armt_engine::Param;

use crate::error::{Error, Result};

/// How a file's tensor is stored in our parameter.
#[derive(Clone, Copy, Debug)]
pub enum Layout {
    /// As it is.
    Plain,
    /// `[out, in]`, or a bias `[out]`: output r is our column `from + r` of `columns`.
    Columns {
        /// Our first column.
        from: usize,
        /// All columns of ours.
        columns: usize,
    },
    /// GPT-NeoX: output (head, q k or v, i) is our column (q k or v, head, i).
    Interleaved {
        /// Heads.
        heads: usize,
        /// Size of each.
        size: usize,
    },
}

/// One tensor of a file.
pub struct Entry<'a> {
    /// The name that we write.
    pub name: String,
    /// Other names that are taken for it.
    pub aliases: Vec<String>,
    /// Its shape in a file.
    pub shape: Vec<usize>,
    /// Where it belongs.
    pub param: &'a Param,
    /// Whether it belongs to the memory and not to the backbone.
    pub of_memory: bool,
    /// Whether it belongs to the memory of a layer that has none: it runs along and changes nothing.
    pub at_rest: bool,
    /// Our elements that belong to its layer.
    at: Range<usize>,
    layout: Layout,
}

impl Entry<'_> {
    /// Names that are taken for it, ours first.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.name.as_str()).chain(self.aliases.iter().map(String::as_str))
    }

    /// Its layer, of a parameter that stacks them.
    pub fn layer(&self) -> usize {
        self.at.start / self.at.len().max(1)
    }

    /// Of a matrix: the columns of our parameter that are its outputs, and how a file's `[out, ..]` is stored in a parameter that has these
    /// columns alone.
    pub fn outputs(&self) -> (Range<usize>, Layout) {
        let columns = |n: usize| Layout::Columns { from: 0, columns: n };
        match self.layout {
            Layout::Plain => (0..self.shape[1], columns(self.shape[1])),
            Layout::Columns { from, .. } => (from..from + self.shape[0], columns(self.shape[0])),
            Layout::Interleaved { .. } => (0..self.shape[0], self.layout),
        }
    }

    /// Refuses a file's tensor of another shape.
    pub fn expect_shape(&self, path: &Path, name: &str, shape: &[usize]) -> Result<()> {
        if shape == self.shape {
            return Ok(());
        }
        Err(Error::file(path, format!("{name} should be {:?}, but is {shape:?}", self.shape)))
    }

    /// For each element of the file's tensor, in order, our element of this layer.
    fn each(&self, mut f: impl FnMut(usize, usize)) {
        let n: usize = self.shape.iter().product();
        let (columns, column): (usize, Box<dyn Fn(usize) -> usize>) = match self.layout {
            Layout::Plain => return (0..n).for_each(|i| f(i, i)),
            Layout::Columns { from, columns } => (columns, Box::new(move |r| from + r)),
            Layout::Interleaved { heads, size } => {
                (3 * heads * size, Box::new(move |r| (r / size % 3) * heads * size + r / (3 * size) * size + r % size))
            }
        };
        let inner = if self.shape.len() == 2 { self.shape[1] } else { 1 };
        for r in 0..self.shape[0] {
            let column = column(r);
            (0..inner).for_each(|i| f(r * inner + i, i * columns + column));
        }
    }

    /// Puts a file's values where they belong in the whole parameter's.
    pub fn import(&self, data: &[f32], values: &mut [f32]) {
        let own = &mut values[self.at.clone()];
        self.each(|file, ours| own[ours] = data[file]);
    }

    /// Takes a file's values out of the whole parameter's.
    pub fn export(&self, values: &[f32]) -> Vec<f32> {
        let own = &values[self.at.clone()];
        let mut data = vec![0.0; self.shape.iter().product()];
        self.each(|file, ours| data[file] = own[ours]);
        data
    }
}

/// A tensor of a file that is written: an entry, whole or some rows of it, under a name of its own.
pub struct FileTensor<'a> {
    /// Its name in the file.
    pub name: String,
    /// What it is taken from.
    pub entry: Entry<'a>,
    /// Which of its rows, if not all.
    pub rows: Option<Range<usize>>,
}

impl<'a> FileTensor<'a> {
    /// A whole entry under its own name.
    pub fn whole(entry: Entry<'a>) -> Self {
        FileTensor { name: entry.name.clone(), entry, rows: None }
    }

    /// Its shape.
    pub fn shape(&self) -> Vec<usize> {
        let mut shape = self.entry.shape.clone();
        self.rows.iter().for_each(|rows| shape[0] = rows.len());
        shape
    }

    /// Its values, of those of the whole parameter.
    pub fn values(&self, values: &[f32]) -> Vec<f32> {
        let values = self.entry.export(values);
        let Some(rows) = &self.rows else { return values };
        let row: usize = self.entry.shape[1..].iter().product();
        values[rows.start * row..rows.end * row].to_vec()
    }
}

/// Every tensor of a model's file, being listed. Names that are added get the prefix that stands, and aliases without it.
pub struct EntryList<'a> {
    entries: Vec<Entry<'a>>,
    layers: usize,
    of_memory: bool,
    at_rest: bool,
}

impl<'a> EntryList<'a> {
    /// An empty list for parameters that stack `layers` layers.
    pub fn new(layers: usize) -> Self {
        EntryList { entries: Vec::new(), layers, of_memory: false, at_rest: false }
    }

    /// What follows belongs to the memory.
    pub fn memory(&mut self, add: impl FnOnce(&mut Self)) {
        self.of_memory = true;
        add(self);
        self.of_memory = false;
    }

    /// What follows is at rest, or not.
    pub fn resting(&mut self, at_rest: bool, add: impl FnOnce(&mut Self)) {
        self.at_rest = at_rest;
        add(self);
        self.at_rest = false;
    }

    /// The tensors.
    pub fn into_entries(self) -> Vec<Entry<'a>> {
        self.entries
    }

    /// Gives each entry of the list further names by a rule.
    pub fn alias(&mut self, names: impl Fn(&str) -> Vec<String>) {
        for entry in &mut self.entries {
            entry.aliases.extend(names(&entry.name).into_iter().filter(|name| *name != entry.name));
            entry.aliases.dedup();
        }
    }

    /// A whole parameter as it is.
    pub fn whole(&mut self, name: String, param: &'a Param) {
        let at = 0..param.value().elements();
        let shape = param.value().dims().to_vec();
        self.push(name, shape, param, at, Layout::Plain);
    }

    /// A whole parameter `[in, out]` that files have as `[out, in]`.
    pub fn turned(&mut self, name: String, param: &'a Param) {
        let (at, dims) = (0..param.value().elements(), param.value().dims());
        self.push(name, vec![dims[1], dims[0]], param, at, Layout::Columns { from: 0, columns: dims[1] });
    }

    /// Layer l of a stacked parameter.
    pub fn layer(&mut self, name: String, param: &'a Param, l: usize, shape: Vec<usize>, layout: Layout) {
        let size = param.value().elements() / self.layers;
        self.push(name, shape, param, l * size..(l + 1) * size, layout);
    }

    fn push(&mut self, name: String, shape: Vec<usize>, param: &'a Param, at: Range<usize>, layout: Layout) {
        let (of_memory, at_rest) = (self.of_memory, self.at_rest);
        self.entries.push(Entry { name, aliases: Vec::new(), shape, param, of_memory, at_rest, at, layout });
    }
}
