//! Where a text may be cut so that its pieces have the tokens of the whole, whatever comes after: its borders.
//!
//! Whether a place is a border follows from the text before it and the characters at it alone. So a text can be read in blocks, tokenized by
//! several threads, and gone on with later: what is before its last border has the tokens that it will always have.
//!
//! Tokenizers of GPT-2's kind (byte-level BPE behind its regular expression, nothing that changes the text first) never join what the
//! expression holds apart:
//!
//! ```text
//! 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//! ```
//!
//! A match of it that ends in no whitespace ends where letters, numbers, other characters or whitespace follow one another, and no alternative
//! goes on beyond such a change but one with an apostrophe before letters. What comes after the change does not alter it: only whitespace
//! looks ahead. So every such change, with no whitespace before it and no apostrophe between, is a border. What class a character has is
//! asked only where every version of Unicode says the same; places beside others are no borders.
//!
//! Those of Llama 3's kind differ in their expression ([`LLAMA3`] and [`QWEN2`]):
//!
//! ```text
//! (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
//! ```
//!
//! A match of it that has a letter ends with its last letter, and none looks further than that, so there is a border wherever what is no letter
//! follows a letter: a text without spaces has them at its punctuation. The other way round there is none, for what is before letters may be
//! joined to them. NFC, which Qwen's have before the expression, joins none of the characters that are looked into to what is before it.
//!
//! Of these, and of any other tokenizer, a single space between two characters that are no whitespace is taken for a border, and it is tried on
//! some texts whether that holds. No kind has a border within one of the tokenizer's added tokens.

use serde_json::Value;
use tokenizers::AddedToken;

/// Llama 3's way to cut a text.
pub(super) const LLAMA3: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen2's, whose digits stand alone.
pub(super) const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The borders of a tokenizer.
#[derive(Debug)]
pub(super) struct Borders {
    rule: Rule,
    added: Vec<Added>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// Where the class of characters changes: GPT-2's kind.
    Classes,
    /// Behind letters, and at single spaces: Llama 3's kind.
    Letters,
    /// At single spaces.
    Spaces,
}

/// A text that is a token by itself wherever it stands.
#[derive(Debug)]
struct Added {
    text: String,
    /// What is before it matters to it.
    looks_back: bool,
    /// What is after it matters to it.
    looks_ahead: bool,
}

/// What the expressions take a character for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Space,
    Letter,
    Number,
    Other,
    /// Not looked into.
    Unsure,
}

impl Borders {
    /// The borders of a tokenizer from its JSON.
    pub(super) fn of(tokenizer: &Value, added: impl Iterator<Item = AddedToken>) -> Self {
        let added: Vec<AddedToken> = added.filter(|token| !token.content.is_empty()).collect();
        let rule = Rule::of(tokenizer, &added);
        let added = added.into_iter().map(|token| Added {
            text: token.content,
            looks_back: token.lstrip || token.single_word,
            looks_ahead: token.rstrip || token.single_word,
        });
        Borders { rule, added: added.collect() }
    }

    /// The last border of a text, not after `end`.
    pub(super) fn last(&self, text: &str, end: usize) -> Option<usize> {
        (1..text.len().min(end + 1)).rev().find(|at| self.is(text, *at))
    }

    /// The first border of a text after `start`, not after `end`.
    pub(super) fn first(&self, text: &str, start: usize, end: usize) -> Option<usize> {
        (start + 1..text.len().min(end + 1)).find(|at| self.is(text, *at))
    }

    /// A text cut at all its borders, where that is known to give its tokens: for GPT-2's kind, if none of the added tokens is in it.
    pub(super) fn words<'t>(&self, text: &'t str) -> Option<Words<'t>> {
        let plain = self.rule == Rule::Classes && !self.added.iter().any(|added| text.contains(&added.text));
        plain.then_some(Words { rest: text })
    }

    fn is(&self, text: &str, at: usize) -> bool {
        if !text.is_char_boundary(at) {
            return false;
        }
        let (left, right) = text.split_at(at);
        let mut after = right.chars();
        let (Some(before), Some(next)) = (left.chars().next_back(), after.next()) else { return false };
        let changes = match self.rule {
            Rule::Classes => changes(before, class(before), class(next)),
            Rule::Letters => ends_letters(before, next) || is_single_space(before, next, after.next()),
            Rule::Spaces => is_single_space(before, next, after.next()),
        };
        changes && !self.added.iter().any(|added| added.spans(left, right))
    }
}

impl Rule {
    fn of(tokenizer: &Value, added: &[AddedToken]) -> Self {
        let (normalizer, before) = (&tokenizer["normalizer"], &tokenizer["pre_tokenizer"]);
        let merged = tokenizer["model"]["type"] == "BPE" && tokenizer["model"]["dropout"].is_null();
        let bytes = |part: &Value| part["type"] == "ByteLevel" && part["add_prefix_space"] == false;
        let split = |part: &Value| {
            let known = part["pattern"]["Regex"].as_str().is_some_and(|expression| [LLAMA3, QWEN2].contains(&expression));
            part["type"] == "Split" && known && part["behavior"] == "Isolated" && part["invert"] == false
        };
        // An added token that is looked for in the normalized text may be there in other characters than those that are looked at here.
        let composed = || normalizer["type"] == "NFC" && !added.iter().any(|token| token.normalized);
        match before["pretokenizers"].as_array().map(Vec::as_slice) {
            _ if !merged => Rule::Spaces,
            None if normalizer.is_null() && bytes(before) && before["use_regex"] != false => Rule::Classes,
            Some([first, second])
                if (normalizer.is_null() || composed()) && split(first) && bytes(second) && second["use_regex"] == false =>
            {
                Rule::Letters
            }
            _ => Rule::Spaces,
        }
    }
}

impl Added {
    /// Whether it lies, or may come to lie, on both sides of a cut, or is beside the cut and asks for what is on the other side.
    fn spans(&self, left: &str, right: &str) -> bool {
        let begun = (1..self.text.len()).any(|n| self.text.is_char_boundary(n) && left.ends_with(&self.text[..n]));
        let after = || {
            let rest = right.trim_start();
            rest.starts_with(&self.text) || self.text.starts_with(rest)
        };
        begun || (self.looks_ahead && left.trim_end().ends_with(&self.text)) || (self.looks_back && after())
    }
}

/// What lies between the borders of a text of GPT-2's kind without added tokens.
pub(super) struct Words<'t> {
    rest: &'t str,
}

impl<'t> Iterator for Words<'t> {
    type Item = &'t str;

    fn next(&mut self) -> Option<&'t str> {
        let mut characters = self.rest.char_indices().map(|(at, c)| (at, c, class(c)));
        let (_, mut before, mut one) = characters.next()?;
        let border = characters.find_map(|(at, next, other)| {
            let found = changes(before, one, other).then_some(at);
            (before, one) = (next, other);
            found
        });
        let (word, rest) = self.rest.split_at(border.unwrap_or(self.rest.len()));
        self.rest = rest;
        Some(word)
    }
}

/// Whether the expression's match ends after a character of class `one` where one of class `other` follows.
fn changes(before: char, one: Class, other: Class) -> bool {
    match (one, other) {
        (Class::Space, _) => false,
        (_, Class::Space) => true,
        (Class::Unsure, _) | (_, Class::Unsure) => false,
        _ => one != other && !(before == '\'' && other == Class::Letter),
    }
}

/// Whether a letter is followed by what is surely none, where every match of Llama 3's expression ends.
fn ends_letters(before: char, next: char) -> bool {
    class(before) == Class::Letter && !matches!(class(next), Class::Letter | Class::Unsure)
}

/// Whether a space stands alone between two characters.
fn is_single_space(before: char, next: char, after: Option<char>) -> bool {
    next == ' ' && !before.is_whitespace() && after.is_some_and(|c| !c.is_whitespace())
}

/// The class of a character, where it has been the same in all versions of Unicode since it came.
fn class(c: char) -> Class {
    match c {
        c if c.is_whitespace() => Class::Space,
        'a'..='z' | 'A'..='Z' => Class::Letter,
        '0'..='9' => Class::Number,
        '\0'..='\x7f' => Class::Other,
        // Guillemets and Spanish marks; dashes, quotes, dots; CJK and full-width punctuation; what is no UTF-8; pictures.
        '\u{a1}' | '\u{ab}' | '\u{bb}' | '\u{bf}' | '\u{2010}'..='\u{2027}' | '\u{2030}'..='\u{205e}' => Class::Other,
        '\u{3001}'..='\u{3003}' | '\u{3008}'..='\u{3011}' | '\u{3014}'..='\u{301f}' => Class::Other,
        '\u{ff01}'..='\u{ff0f}' | '\u{ff1a}'..='\u{ff20}' | '\u{fffd}' | '\u{1f300}'..='\u{1f64f}' => Class::Other,
        '\u{d7}' | '\u{f7}' | '\u{3a2}' => Class::Unsure,
        // Latin, Greek, Cyrillic, Hebrew, Arabic; kana, Han, Hangul.
        '\u{c0}'..='\u{24f}' | '\u{391}'..='\u{3ce}' | '\u{400}'..='\u{481}' | '\u{5d0}'..='\u{5ea}' => Class::Letter,
        '\u{620}'..='\u{64a}' | '\u{3041}'..='\u{3096}' | '\u{30a1}'..='\u{30fa}' => Class::Letter,
        '\u{4e00}'..='\u{9fa5}' | '\u{ac00}'..='\u{d7a3}' => Class::Letter,
        _ => Class::Unsure,
    }
}

#[cfg(test)]
mod tests {
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior};

    use super::*;

    /// Where GPT-2's expression ends its matches.
    fn ends(text: &str) -> Vec<usize> {
        ends_of(&ByteLevel::new(false, true, true), text)
    }

    fn ends_of(expression: &impl PreTokenizer, text: &str) -> Vec<usize> {
        let mut string = PreTokenizedString::from(text);
        expression.pre_tokenize(&mut string).unwrap();
        string.get_splits(OffsetReferential::Original, OffsetType::Byte).into_iter().map(|(_, (_, end), _)| end).collect()
    }

    #[test]
    fn characters_have_the_classes_of_the_expression() {
        let mut sure = 0;
        for c in '\0'..=char::MAX {
            let class = class(c);
            let beside = match class {
                Class::Unsure => continue,
                Class::Letter => 'a',
                Class::Number => '1',
                Class::Other => '!',
                Class::Space => ' ',
            };
            let text = format!("{beside}{c}");
            // Whitespace is held apart from anything else; of the others what is of one class is one match.
            match class {
                Class::Space => assert_eq!(ends(&format!("a{c}")), [1, 1 + c.len_utf8()], "{c:?}"),
                _ => assert_eq!(ends(&text), [text.len()], "{c:?} is no {class:?}"),
            }
            sure += 1;
        }
        assert!(sure > 30_000, "{sure}");
    }

    #[test]
    fn a_text_cut_at_any_border_has_the_matches_of_the_whole() {
        let borders = Borders { rule: Rule::Classes, added: Vec::new() };
        let text = "It's 5 o'clock, don''t we're!' r x  y\n\n z \u{3000}日本。語\u{301} 'll 12ab\u{d7}c";
        let all = ends(text);
        let found: Vec<usize> = (1..text.len()).filter(|at| borders.is(text, *at)).collect();
        assert!(found.len() >= 20, "{found:?}");
        let words: Vec<&str> = borders.words(text).unwrap().collect();
        assert_eq!(words.concat(), text);
        let cuts = words.iter().scan(0, |at, word| {
            *at += word.len();
            Some(*at)
        });
        assert_eq!(cuts.take(words.len() - 1).collect::<Vec<_>>(), found);
        for at in found {
            let (left, right) = text.split_at(at);
            let pieces: Vec<usize> = ends(left).into_iter().chain(ends(right).into_iter().map(|end| at + end)).collect();
            assert_eq!(pieces, all, "cut at {at}");
        }
    }

    #[test]
    fn what_follows_letters_begins_a_match_of_llama_s_and_qwen_s_expressions() {
        let borders = Borders { rule: Rule::Letters, added: Vec::new() };
        let text = "It's 5 o'clock, DON''T we're!' r x  y\n\n z\t\u{3000}日本。語\u{301}か゛い（東京）12ab3x\u{d7}c";
        for expression in [LLAMA3, QWEN2] {
            let pattern = SplitPattern::Regex(expression.into());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap();
            let all = ends_of(&split, text);
            let found: Vec<usize> = (1..text.len()).filter(|at| borders.is(text, *at)).collect();
            assert!(found.len() >= 15 && borders.words(text).is_none(), "{found:?}");
            for at in found {
                let (left, right) = text.split_at(at);
                let right = ends_of(&split, right).into_iter().map(|end| at + end);
                assert_eq!(ends_of(&split, left).into_iter().chain(right).collect::<Vec<_>>(), all, "cut at {at}");
            }
            for c in ('\0'..=char::MAX).filter(|c| class(*c) == Class::Letter) {
                assert_eq!(ends_of(&split, &format!("a{c}!")), [1 + c.len_utf8(), 2 + c.len_utf8()], "{c:?}");
            }
        }
    }

    #[test]
    fn added_tokens_have_no_border_within_or_beside_them_where_that_matters() {
        let added = |text: &str, looks: bool| Added { text: text.into(), looks_back: looks, looks_ahead: looks };
        let borders = |looks| Borders { rule: Rule::Classes, added: vec![added("<|end|>", looks)] };
        let text = "a <|end|> b <|e";
        let found = |looks| (1..text.len()).filter(|at| borders(looks).is(text, *at)).collect::<Vec<_>>();
        assert_eq!(found(false), [1, 9, 11]);
        assert!(borders(false).words(text).is_none() && borders(false).words("a <|end| b").is_some());
        assert!(found(true).is_empty(), "whitespace at both sides of it is its own, and so is that before what may become one");
    }
}
