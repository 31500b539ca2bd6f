//! Texts that end in questions: what is told and what is asked, position by position.

use armt::recurrence::Targets;
use armt::segment::Batch;

use super::TaskBatch;

/// A question as tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The question, and what stands between it and the answer.
    pub question: Vec<i32>,
    /// The answer and the token that ends it.
    pub answer: Vec<i32>,
}

impl Prompt {
    /// Tokens of question and answer together.
    pub fn length(&self) -> usize {
        self.question.len() + self.answer.len()
    }
}

/// A text and what its positions should predict.
#[derive(Clone, Debug, Default)]
pub struct Text {
    /// Tokens.
    pub ids: Vec<i32>,
    /// What each position should predict; negative where nothing is asked, as in [`Targets`].
    pub next: Vec<i32>,
}

impl Text {
    /// Adds tokens that nothing is asked of.
    pub fn tell(&mut self, tokens: impl IntoIterator<Item = i32>) {
        self.ids.extend(tokens);
        self.next.resize(self.ids.len(), -1);
    }

    /// Adds tokens that are background: nothing will be asked about them.
    pub fn pass(&mut self, tokens: impl IntoIterator<Item = i32>) {
        self.ids.extend(tokens);
        self.next.resize(self.ids.len(), Targets::BACKGROUND);
    }

    /// A question and its answer, which is predicted from the question's last token on.
    pub fn ask(&mut self, prompt: &Prompt) {
        self.tell(prompt.question.iter().copied());
        if let (Some(before), Some(first)) = (self.next.last_mut(), prompt.answer.first()) {
            *before = *first;
        }
        for (i, token) in prompt.answer.iter().enumerate() {
            self.ids.push(*token);
            self.next.push(prompt.answer.get(i + 1).copied().unwrap_or(-1));
        }
    }

    /// Fills the last segment up.
    pub fn fill(&mut self, segment: usize, token: i32) {
        self.fill_to(self.ids.len().next_multiple_of(segment), token);
    }

    /// Fills up to a length; a text that is longer stays as it is.
    pub fn fill_to(&mut self, length: usize, token: i32) {
        let length = length.max(self.ids.len());
        self.ids.resize(length, token);
        self.next.resize(length, -1);
    }
}

impl TaskBatch {
    /// Texts as a batch, those that are shorter than the longest filled up.
    pub fn of(mut texts: Vec<Text>, fill: i32) -> Self {
        let length = texts.iter().map(|text| text.ids.len()).max().unwrap_or_default();
        texts.iter_mut().for_each(|text| text.fill_to(length, fill));
        let (ids, next) = (texts.iter().flat_map(|t| t.ids.clone()).collect(), texts.iter().flat_map(|t| t.next.clone()).collect());
        TaskBatch { batch: Batch { ids, texts: texts.len(), mask: None }, targets: Targets { next } }
    }
}
