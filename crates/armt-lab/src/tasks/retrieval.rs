//! Associative retrieval: n key-value pairs, then one key to give the value of.
//!
//! A pair is a segment `k_1..k_K SEP v_1..v_V EOS`, and so is the question, `k_1..k_K GEN v_1..v_V EOS`: n + 1 segments of K + V + 2
//! tokens, so that the answer can only come through the memory. Asked for are the V values and EOS, predicted from GEN onwards.
//!
//! Texts are drawn as they are needed and never repeat, where the authors keep a fixed million. Keeping the last n' pairs of a longer
//! text and drawing the question anew, as they do to vary the length, gives the same texts as drawing n' pairs.

mod training;

use std::collections::{HashMap, HashSet};
use std::str::FromStr;

use armt::engine::machine::expect_room;
use armt::random::Random;
use armt::recurrence::Targets;
use armt::segment::Batch;
use serde::{Deserialize, Serialize};

pub use self::training::{REMEMBER, REWRITE, RetrievalLessons, RetrievalTraining};

use super::TaskBatch;
use crate::error::{Error, Result};

/// Tokens of a model for this task, those that are never used included.
pub const VOCAB: usize = 128;
/// Symbols that keys and values are made of unless a task says otherwise, as in the authors' scripts: the tokens from 0.
pub const SYMBOLS: usize = 16;
/// Between a key and its value.
pub const SEP: i32 = 100;
/// Between the key that is asked for and the answer.
pub const GEN: i32 = 101;
/// Ends a pair and the answer.
pub const EOS: i32 = 102;

/// Symbols that fit below the marks.
const MOST_SYMBOLS: usize = SEP as usize;
/// Up to so many keys, all are listed and dealt like cards; beyond, they are drawn until a new one comes.
const DEALT_KEYS: usize = 1 << 20;

/// Whether keys come again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Setting {
    /// All keys of a text are different.
    Remember,
    /// Keys come again with new values, and the latest value counts.
    Rewrite,
}

impl FromStr for Setting {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        match s {
            "remember" => Ok(Setting::Remember),
            "rewrite" => Ok(Setting::Rewrite),
            other => Err(Error::config("setting", "remember or rewrite", other)),
        }
    }
}

/// The task: its setting and sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retrieval {
    /// Whether keys come again.
    pub setting: Setting,
    /// Symbols of a key, K.
    pub key_size: usize,
    /// Symbols of a value, V.
    pub value_size: usize,
    /// Different symbols that there are: [`SYMBOLS`] in the paper.
    pub symbols: usize,
}

impl Retrieval {
    /// Tokens of a pair, and of the question with its answer: K + V + 2.
    pub fn segment_size(&self) -> usize {
        self.key_size.saturating_add(self.value_size).saturating_add(2)
    }

    /// Refuses texts that the machine could not hold side by side.
    pub fn expect_room(&self, pairs: usize, questions: usize, batch: usize) -> Result<()> {
        let segments = pairs.saturating_add(questions);
        // Tokens and what is to be said after each.
        Ok(expect_room("pairs by texts", &[batch, segments, self.segment_size(), 2 * size_of::<i32>()])?)
    }

    /// Refuses fewer than 2 or more than 100 symbols, sizes of zero, keys whose number, below symbols^K, does not fit 64 bits, and in
    /// [`Setting::Remember`] more pairs than there are keys.
    pub fn check(&self, pairs: usize) -> Result<()> {
        let (k, v) = (self.key_size, self.value_size);
        self.check_symbols()?;
        let longest = u64::MAX.ilog(self.symbols as u64) as usize;
        if !(1..=longest).contains(&k) {
            return Err(Error::input("key size", format!("1 to {longest} symbols"), k));
        }
        if v == 0 {
            return Err(Error::input("value size", "at least 1 symbol", 0));
        }
        if pairs == 0 {
            return Err(Error::input("pairs", "at least 1", 0));
        }
        let keys = self.keys();
        if self.setting == Setting::Remember && keys < pairs {
            let expected = format!("at most as many as there are different keys, only {keys} of {k} of {} symbols", self.symbols);
            return Err(Error::input("pairs", expected, pairs));
        }
        Ok(())
    }

    /// Refuses fewer than 2 or more than 100 symbols: token 100 is a mark.
    pub fn check_symbols(&self) -> Result<()> {
        if (2..=MOST_SYMBOLS).contains(&self.symbols) {
            return Ok(());
        }
        Err(Error::config("symbols", &format!("2 to {MOST_SYMBOLS}, the tokens below the marks"), self.symbols))
    }

    /// Different keys that there are, symbols^K.
    fn keys(&self) -> usize {
        self.symbols.saturating_pow(self.key_size as u32)
    }

    /// Different values that there are, symbols^V.
    pub fn values(&self) -> usize {
        self.symbols.saturating_pow(self.value_size as u32)
    }

    /// Different keys that a text of `pairs` pairs has on average: all of them, or where keys come again m (1 - (1 - 1 / m)^n) for m
    /// keys and n pairs.
    pub fn different_keys(&self, pairs: usize) -> f64 {
        let (m, n) = (self.keys() as f64, pairs as f64);
        match self.setting {
            Setting::Remember => n,
            Setting::Rewrite => -m * (n * (-1.0 / m).ln_1p()).exp_m1(),
        }
    }

    /// Texts of `pairs` pairs and a question each. Equal generators give equal texts. Refuses what [`Retrieval::check`] refuses,
    /// and a batch of none.
    pub fn batch(&self, pairs: usize, batch: usize, random: &mut Random) -> Result<TaskBatch> {
        self.batch_asking(pairs, 1, batch, random)
    }

    /// Texts of `pairs` pairs and several questions one after the other, each drawn anew: more is learned from the pairs of a long text.
    pub fn batch_asking(&self, pairs: usize, questions: usize, batch: usize, random: &mut Random) -> Result<TaskBatch> {
        self.check(pairs)?;
        if batch == 0 || questions == 0 {
            return Err(Error::input("batch", "at least 1 text with at least 1 question", format!("{batch} and {questions}")));
        }
        self.expect_room(pairs, questions, batch)?;
        let (k, v, size) = (self.key_size, self.value_size, self.segment_size());
        let mut deal = (self.setting == Setting::Remember).then(|| Deal::new(self.keys()));
        let mut ids = Vec::with_capacity(batch * (pairs + questions) * size);
        let mut next = Vec::with_capacity(ids.capacity());
        for _ in 0..batch {
            let keys = match &mut deal {
                Some(deal) => deal.distinct(pairs, random),
                None => (0..pairs).map(|_| random.below(self.keys())).collect(),
            };
            let values: Vec<i32> = (0..pairs * v).map(|_| random.below(self.symbols) as i32).collect();
            for (key, value) in keys.iter().zip(values.chunks(v)) {
                self.push_segment(&mut ids, *key, SEP, value);
            }
            next.extend(std::iter::repeat_n(-1, pairs * size));
            for _ in 0..questions {
                let asked = match self.setting {
                    Setting::Remember => random.below(pairs),
                    Setting::Rewrite => latest_of_one_key(&keys, random),
                };
                self.push_segment(&mut ids, keys[asked], GEN, &values[asked * v..][..v]);
                // GEN and each value predict the token after them.
                let answer = &ids[ids.len() - v - 1..];
                next.extend(std::iter::repeat_n(-1, k));
                next.extend_from_slice(answer);
                next.push(-1);
            }
        }
        Ok(TaskBatch { batch: Batch { ids, texts: batch, mask: None }, targets: Targets { next } })
    }

    /// Appends a key, a mark, a value and EOS. The key's symbols are the digits of its number, the lowest first.
    fn push_segment(&self, ids: &mut Vec<i32>, key: usize, mark: i32, value: &[i32]) {
        let digits = std::iter::successors(Some(key), |rest| Some(rest / self.symbols)).map(|rest| (rest % self.symbols) as i32);
        ids.extend(digits.take(self.key_size));
        ids.push(mark);
        ids.extend_from_slice(value);
        ids.push(EOS);
    }
}

/// Picks one of the different keys, all alike however often they come, and gives where it comes last.
fn latest_of_one_key(keys: &[usize], random: &mut Random) -> usize {
    // In the order in which keys first come: a map's own order is not the same on every machine.
    let mut places: HashMap<usize, usize> = HashMap::new();
    let mut latest: Vec<usize> = Vec::new();
    for (i, key) in keys.iter().enumerate() {
        let place = *places.entry(*key).or_insert(latest.len());
        if place == latest.len() {
            latest.push(i);
        } else {
            latest[place] = i;
        }
    }
    latest[random.below(latest.len())]
}

/// Draws different keys.
enum Deal {
    /// All keys, in the order that the texts so far left: any order is as good to deal from as another.
    Cards(Vec<usize>),
    /// Numbers below this, far more of them than any text has pairs.
    Below(usize),
}

impl Deal {
    fn new(keys: usize) -> Self {
        if keys <= DEALT_KEYS { Deal::Cards((0..keys).collect()) } else { Deal::Below(keys) }
    }

    /// `n` different keys, at most as many as there are.
    fn distinct(&mut self, n: usize, random: &mut Random) -> Vec<usize> {
        match self {
            Deal::Cards(cards) => {
                for i in 0..n {
                    let j = i + random.below(cards.len() - i);
                    cards.swap(i, j);
                }
                cards[..n].to_vec()
            }
            Deal::Below(keys) => {
                let (mut seen, mut drawn) = (HashSet::with_capacity(n), Vec::with_capacity(n));
                while drawn.len() < n {
                    let key = random.below(*keys);
                    if seen.insert(key) {
                        drawn.push(key);
                    }
                }
                drawn
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(setting: Setting, key_size: usize, value_size: usize) -> Retrieval {
        Retrieval { setting, key_size, value_size, symbols: SYMBOLS }
    }

    fn example(task: Retrieval, pairs: usize, batch: usize, seed: u64) -> TaskBatch {
        task.batch(pairs, batch, &mut Random::new(seed)).unwrap()
    }

    /// Each text's pairs, and the key and value of its question.
    fn pairs_of(task: Retrieval, e: &TaskBatch) -> Vec<(Vec<(Vec<i32>, Vec<i32>)>, (Vec<i32>, Vec<i32>))> {
        let (k, v) = (task.key_size, task.value_size);
        let split = |s: &[i32]| (s[..k].to_vec(), s[k + 1..][..v].to_vec());
        let text = |row: &[i32]| {
            let mut pairs: Vec<_> = row.chunks(task.segment_size()).map(split).collect();
            let asked = pairs.pop().unwrap();
            (pairs, asked)
        };
        e.batch.ids.chunks(e.batch.tokens()).map(text).collect()
    }

    #[test]
    fn a_pair_is_a_segment_and_the_answer_is_asked_from_gen_onwards() {
        for setting in [Setting::Remember, Setting::Rewrite] {
            for (k, v, pairs) in [(1, 1, 1), (2, 1, 5), (3, 2, 4), (6, 3, 2)] {
                let task = task(setting, k, v);
                let (size, e) = (task.segment_size(), example(task, pairs, 3, 1));
                assert_eq!((size, e.batch.texts, e.batch.tokens()), (k + v + 2, 3, (pairs + 1) * size));
                assert!(e.batch.mask.is_none());
                assert_eq!(e.targets.next.len(), e.batch.ids.len());
                for (row, next) in e.batch.ids.chunks(e.batch.tokens()).zip(e.targets.next.chunks(e.batch.tokens())) {
                    for (s, segment) in row.chunks(size).enumerate() {
                        assert_eq!(segment[k], if s == pairs { GEN } else { SEP });
                        assert_eq!(segment[size - 1], EOS);
                        let symbols = segment[..k].iter().chain(&segment[k + 1..size - 1]);
                        assert!(symbols.into_iter().all(|t| (0..SYMBOLS as i32).contains(t)));
                    }
                    let first = pairs * size + k;
                    for (i, target) in next.iter().enumerate() {
                        let asked = (first..first + v + 1).contains(&i);
                        assert_eq!(*target, if asked { row[i + 1] } else { -1 }, "position {i}");
                    }
                }
            }
        }
    }

    #[test]
    fn remembered_keys_are_different_and_the_answer_is_their_value() {
        // All keys that there are, some of many, and some of too many to list.
        for (k, pairs) in [(1, 16), (2, 50), (6, 300)] {
            let task = task(Setting::Remember, k, 2);
            for (pairs, (key, value)) in pairs_of(task, &example(task, pairs, 20, 2)) {
                let keys: HashSet<_> = pairs.iter().map(|(k, _)| k.clone()).collect();
                assert_eq!(keys.len(), pairs.len());
                assert_eq!(pairs.iter().find(|(k, _)| *k == key).unwrap().1, value);
            }
        }
    }

    #[test]
    fn several_questions_are_each_about_a_pair_and_the_first_is_that_of_a_text_with_one() {
        for setting in [Setting::Remember, Setting::Rewrite] {
            let (task, pairs, questions) = (task(setting, 2, 1), 30, 8);
            let (size, e) = (task.segment_size(), task.batch_asking(pairs, questions, 1, &mut Random::new(5)).unwrap());
            assert_eq!(e.batch.tokens(), (pairs + questions) * size);
            let alone = example(task, pairs, 1, 5);
            assert_eq!(alone.batch.ids, e.batch.ids[..(pairs + 1) * size]);
            assert_eq!(alone.targets.next, e.targets.next[..(pairs + 1) * size]);
            let segments: Vec<&[i32]> = e.batch.ids.chunks(size).collect();
            let mut asked = HashSet::new();
            for (question, next) in segments.iter().zip(e.targets.next.chunks(size)).skip(pairs) {
                let pair = segments[..pairs].iter().rev().find(|s| s[..2] == question[..2]).unwrap();
                assert_eq!((question[2], &question[3..]), (GEN, &pair[3..]));
                assert_eq!(next, [-1, -1, pair[3], EOS, -1]);
                asked.insert(question[..2].to_vec());
            }
            assert!(asked.len() > 4, "{} different keys asked for", asked.len());
        }
        assert!(task(Setting::Rewrite, 1, 1).batch_asking(1, 0, 1, &mut Random::new(0)).is_err());
    }

    #[test]
    fn the_latest_value_of_a_rewritten_key_is_the_answer() {
        let task = task(Setting::Rewrite, 1, 1);
        let mut again = 0;
        for (pairs, (key, value)) in pairs_of(task, &example(task, 40, 50, 3)) {
            assert_eq!(pairs.iter().rev().find(|(k, _)| *k == key).unwrap().1, value);
            again += usize::from(pairs.iter().find(|(k, _)| *k == key).unwrap().1 != value);
        }
        assert!(again > 20, "keys must come again with other values: {again} of 50 did");
    }

    #[test]
    fn a_rewritten_key_is_asked_for_as_often_as_one_that_came_once() {
        // Two pairs in three have key 0; uniform over different keys is still a half each.
        let mut random = Random::new(4);
        let n = 4000;
        let first = (0..n).filter(|_| latest_of_one_key(&[0, 0, 7], &mut random) == 1).count();
        assert!((1800..2200).contains(&first), "{first} of {n}");
    }

    #[test]
    fn different_keys_are_as_many_as_expected() {
        let task = task(Setting::Rewrite, 1, 1);
        let texts = pairs_of(task, &example(task, 20, 2000, 9));
        let different: usize = texts.iter().map(|(pairs, _)| pairs.iter().map(|(k, _)| k[0]).collect::<HashSet<_>>().len()).sum();
        assert!((different as f64 / 2000.0 - task.different_keys(20)).abs() < 0.1);
        assert!((task.different_keys(1) - 1.0).abs() < 1e-9 && (task.different_keys(10_000) - 16.0).abs() < 1e-9);
        assert_eq!(Retrieval { setting: Setting::Remember, ..task }.different_keys(7), 7.0);
    }

    #[test]
    fn equal_seeds_give_equal_texts_and_others_do_not() {
        for (setting, k) in [(Setting::Remember, 2), (Setting::Remember, 6), (Setting::Rewrite, 1)] {
            let of = |seed| example(task(setting, k, 1), 10, 4, seed).batch.ids;
            assert_eq!(of(5), of(5));
            assert_ne!(of(5), of(6));
        }
        // The same on every machine.
        let e = example(task(Setting::Remember, 1, 1), 2, 1, 0);
        assert_eq!(e.batch.ids, [14, SEP, 0, EOS, 7, SEP, 15, EOS, 14, GEN, 0, EOS]);
    }

    #[test]
    fn symbols_and_asked_pairs_are_uniform() {
        let task = task(Setting::Remember, 2, 1);
        let (n, pairs) = (4000usize, 5);
        let (mut keys, mut values, mut asked) = ([[0usize; 16]; 2], [0usize; 16], [0usize; 5]);
        for (text, (key, _)) in pairs_of(task, &example(task, pairs, n, 7)) {
            for (key, value) in &text {
                key.iter().enumerate().for_each(|(i, symbol)| keys[i][*symbol as usize] += 1);
                values[value[0] as usize] += 1;
            }
            asked[text.iter().position(|(k, _)| *k == key).unwrap()] += 1;
        }
        // 1250 each, with a deviation of 34, and 800 each, with one of 25.
        assert!(keys.iter().flatten().chain(&values).all(|c| c.abs_diff(n * pairs / 16) < 170), "{keys:?} {values:?}");
        assert!(asked.iter().all(|c| c.abs_diff(n / pairs) < 125), "{asked:?}");
    }

    #[test]
    fn more_pairs_than_keys_are_refused_with_both_numbers() {
        let said = task(Setting::Remember, 1, 1).check(17).unwrap_err().to_string();
        assert!(said.contains("17") && said.contains("16"), "{said}");
        assert!(task(Setting::Remember, 1, 1).check(16).is_ok());
        assert!(task(Setting::Rewrite, 1, 1).check(17).is_ok());
        for (k, v, pairs) in [(0, 1, 1), (16, 1, 1), (1, 0, 1), (1, 1, 0)] {
            assert!(task(Setting::Rewrite, k, v).check(pairs).is_err());
        }
        assert!(task(Setting::Remember, 1, 1).batch(1, 0, &mut Random::new(0)).is_err());
    }

    #[test]
    fn keys_and_values_are_made_of_as_many_symbols_as_the_task_has() {
        for (symbols, k, pairs) in [(2, 5, 32), (32, 1, 32), (100, 1, 100), (100, 9, 3)] {
            let task = Retrieval { symbols, ..task(Setting::Remember, k, 2) };
            let texts = pairs_of(task, &example(task, pairs, 40, 6));
            let mut seen = HashSet::new();
            for (pairs, (key, value)) in &texts {
                assert_eq!(pairs.iter().map(|(k, _)| k).collect::<HashSet<_>>().len(), pairs.len());
                assert_eq!(pairs.iter().find(|(k, _)| k == key).unwrap().1, *value);
                pairs.iter().for_each(|(k, v)| seen.extend(k.iter().chain(v).copied()));
            }
            assert_eq!(seen, (0..symbols as i32).collect(), "{symbols} symbols");
            assert_eq!(task.values(), symbols * symbols);
        }
    }

    #[test]
    fn symbols_that_are_too_few_or_run_into_the_marks_are_refused() {
        for symbols in [0, 1, 101] {
            let said = Retrieval { symbols, ..task(Setting::Rewrite, 1, 1) }.check(1).unwrap_err().to_string();
            assert!(said.contains("symbols: expected 2 to 100") && said.ends_with(&symbols.to_string()), "{said}");
        }
        let said = Retrieval { symbols: 32, ..task(Setting::Remember, 1, 1) }.check(33).unwrap_err().to_string();
        assert!(said.contains("only 32 of 1 of 32 symbols"), "{said}");
        assert!(Retrieval { symbols: 100, ..task(Setting::Rewrite, 10, 1) }.check(1).is_err(), "100^10 does not fit");
    }

    #[test]
    fn settings_are_read_as_they_are_written() {
        assert_eq!("rewrite".parse::<Setting>().unwrap(), Setting::Rewrite);
        assert_eq!(serde_json::to_string(&Setting::Remember).unwrap(), "\"remember\"");
        assert!("forget".parse::<Setting>().unwrap_err().to_string().contains("remember or rewrite"));
    }
}
