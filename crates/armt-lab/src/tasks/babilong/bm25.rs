//! BM25 over the sentences of a context (Robertson and others 1994): what retrieval alone finds for a question.
//!
//! ```text
//! score(s) = sum over words w of the question of  idf(w) f (k1 + 1) / (f + k1 (1 - b + b |s| / mean |s|))
//! idf(w)   = ln(1 + (n - n_w + 1/2) / (n_w + 1/2))          f: how often w is in s;  n_w: sentences with w, of n
//! ```
//!
//! The k best sentences, of equal ones the later, are the whole context, in their order. The context is read twice as a stream, and nothing of it
//! is kept but the best. Words are runs of letters and digits, in lower case.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Sample;
use crate::error::Result;
use armt::text::Tokenizer;

const K1: f64 = 1.2;
const B: f64 = 0.75;

/// The words of a text.
fn words(text: &str) -> impl Iterator<Item = String> + '_ {
    text.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty()).map(str::to_lowercase)
}

/// What the question's words are worth, and how long sentences are.
struct Weights {
    idf: BTreeMap<String, f64>,
    mean: f64,
}

impl Weights {
    /// From the question's words with the sentences that have each, of `n` sentences of `total` words.
    fn new(found: BTreeMap<String, usize>, n: usize, total: usize) -> Self {
        let idf = |with: usize| (1.0 + (n as f64 - with as f64 + 0.5) / (with as f64 + 0.5)).ln();
        Weights { idf: found.into_iter().map(|(word, with)| (word, idf(with))).collect(), mean: total as f64 / n.max(1) as f64 }
    }

    fn score(&self, sentence: &str) -> f64 {
        let (mut counts, mut length) = (BTreeMap::<String, usize>::new(), 0);
        for word in words(sentence) {
            length += 1;
            if self.idf.contains_key(&word) {
                *counts.entry(word).or_default() += 1;
            }
        }
        let norm = K1 * (1.0 - B + B * length as f64 / self.mean.max(1.0));
        counts.iter().map(|(word, f)| self.idf[word] * *f as f64 * (K1 + 1.0) / (*f as f64 + norm)).sum()
    }
}

/// Calls `each` with the text and the tokens of every sentence of a sample's context.
fn each_sentence(sample: &Sample, tokenizer: &Tokenizer, mut each: impl FnMut(&str, &[i32])) -> Result<()> {
    let mut context = sample.context();
    while let Some(piece) = context.next_piece()? {
        each(&tokenizer.decode(piece.tokens())?, piece.tokens());
    }
    Ok(())
}

impl Sample {
    /// The sample with the best `k` sentences of its context in place of the context, as many of them as fit into `room` tokens.
    pub fn retrieved(&self, tokenizer: &Tokenizer, k: usize, room: usize) -> Result<Sample> {
        let mut found: BTreeMap<String, usize> = words(&self.story.question.text).map(|word| (word, 0)).collect();
        let (mut n, mut total) = (0, 0);
        each_sentence(self, tokenizer, |text, _| {
            let mut own: Vec<String> = words(text).collect();
            (n, total) = (n + 1, total + own.len());
            own.sort_unstable();
            own.dedup();
            for word in own {
                if let Some(with) = found.get_mut(&word) {
                    *with += 1;
                }
            }
        })?;
        let weights = Weights::new(found, n, total);
        // The best so far with their places, the best first.
        let mut best: Vec<(f64, usize, Arc<[i32]>)> = Vec::new();
        let mut place = 0;
        each_sentence(self, tokenizer, |text, tokens| {
            let score = weights.score(text);
            let at = best.partition_point(|(other, ..)| *other > score);
            if at < k {
                best.insert(at, (score, place, tokens.into()));
                best.truncate(k);
            }
            place += 1;
        })?;
        let mut left = room;
        best.retain(|(_, _, tokens)| {
            let fits = tokens.len() <= left;
            left -= if fits { tokens.len() } else { 0 };
            fits
        });
        best.sort_unstable_by_key(|(_, place, _)| *place);
        let facts: Vec<Arc<[i32]>> = best.into_iter().map(|(.., tokens)| tokens).collect();
        Ok(Sample { gaps: vec![0; facts.len()], facts, background: 0, reading: None, ..self.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rare_words_count_more_and_long_sentences_less() {
        let found = [("where", 8), ("mary", 2)].map(|(word, with)| (word.to_string(), with));
        let weights = Weights::new(BTreeMap::from(found), 10, 60);
        let score = |text: &str| weights.score(text);
        assert!(score("Mary went there.") > score("Where to go?"));
        assert!(score("Mary went there.") > score("Mary went there by a way that nobody had ever seen."));
        assert!(score("Mary and MARY") > score("Mary and John"));
        assert_eq!(score("John went there."), 0.0);
        // Three words where six are usual: 1.2 (1/4 + 3/4 1/2) = 0.75.
        let expected = (1.0f64 + 8.5 / 2.5).ln() * 2.2 / 1.75;
        assert!((score("Mary went there.") - expected).abs() < 1e-12);
    }
}
