//! Whether an answer is right: the paper's strict match, and the benchmark's own, which looks for labels in what a model says.
//!
//! The benchmark's: of the output in lower case, what comes before the first full stop and before `<context>` or `<example>`. Of the
//! task's labels those that it contains, less those that the question contains, must be the target and nothing else; where the target is
//! a list, its parts and nothing else. A label is contained wherever its letters are: "not" contains "no", and qa7's "none", which
//! contains "one", is never right. That is the benchmark's rule, and ours only so that numbers can be compared.

use crate::tasks::babi::Task;

const ROOMS: &[&str] = &["bathroom", "bedroom", "garden", "hallway", "kitchen", "office"];
const YES_OR_NO: &[&str] = &["no", "yes"];

/// The benchmark's labels of a task: every answer that its published files have, a list's parts each by itself.
pub fn labels(task: Task) -> &'static [&'static str] {
    match task.number() {
        5 => &["apple", "bill", "football", "fred", "jeff", "mary", "milk"],
        6 | 9 | 17 | 18 => YES_OR_NO,
        7 => &["none", "one", "three", "two"],
        8 => &["apple", "football", "milk", "nothing"],
        10 => &["maybe", "no", "yes"],
        14 => &["bedroom", "cinema", "kitchen", "office", "park", "school"],
        15 => &["cat", "mouse", "sheep", "wolf"],
        16 => &["gray", "green", "white", "yellow"],
        19 => &["e,e", "e,n", "e,s", "n,e", "n,n", "n,w", "s,e", "s,s", "s,w", "w,n", "w,s", "w,w"],
        20 => &["bedroom", "bored", "garden", "hungry", "kitchen", "thirsty", "tired"],
        _ => ROOMS,
    }
}

/// Whether the output, without white space around it, is the target to the letter.
pub fn exact_match(target: &str, output: &str) -> bool {
    output.trim() == target
}

/// Whether the output is right by the benchmark's rule.
pub fn label_match(task: Task, target: &str, output: &str, question: &str) -> bool {
    let (target, output, question) = (target.to_lowercase(), output.to_lowercase(), question.to_lowercase());
    let end = [".", "<context>", "<example>"].iter().filter_map(|end| output.find(end)).min();
    let output = &output[..end.unwrap_or(output.len())];
    let found: Vec<&str> = labels(task).iter().copied().filter(|l| output.contains(l) && !question.contains(l)).collect();
    // A way of two steps is a label of its own, for all that it has a comma.
    let parts: Vec<&str> = if labels(task).contains(&target.as_str()) { vec![&target] } else { target.split(',').collect() };
    found.len() == parts.len() && parts.iter().all(|part| found.contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use crate::tasks::babi::file::{Split, samples};

    fn right(task: usize, target: &str, output: &str, question: &str) -> bool {
        label_match(Task::new(task).unwrap(), target, output, question)
    }

    #[test]
    fn the_strict_match_is_to_the_letter_but_for_white_space_around() {
        assert!(exact_match("garden", " garden\n") && exact_match("football,apple", "football,apple"));
        assert!(!exact_match("garden", "Garden") && !exact_match("garden", "garden.") && !exact_match("garden", "the garden"));
    }

    #[test]
    fn the_target_must_be_the_only_label_of_the_first_sentence() {
        let asked = "Where is Mary?";
        assert!(right(1, "garden", "Mary is in the GARDEN. Or in the kitchen.", asked));
        assert!(right(1, "garden", "garden<context> kitchen", asked) && right(1, "garden", "garden <example>office", asked));
        assert!(!right(1, "garden", "in the garden or the kitchen", asked) && !right(1, "garden", "office", asked));
        assert!(!right(1, "garden", "", asked) && !right(1, "garden", "Well. In the garden", asked));
    }

    #[test]
    fn labels_of_the_question_do_not_count() {
        assert!(right(3, "office", "Before the kitchen it was in the office", "Where was the milk before the kitchen?"));
        assert!(right(5, "Fred", "Mary gave it to Fred", "Who did Mary give the milk to?"));
        assert!(!right(5, "Fred", "Fred or Bill", "Who did Mary give the milk to?"));
    }

    #[test]
    fn a_list_must_be_whole_in_any_order_and_have_no_more() {
        let asked = "What is Mary carrying?";
        assert!(right(8, "milk,apple", "apple and milk", asked) && right(8, "nothing", "Nothing", asked));
        assert!(!right(8, "milk,apple", "apple", asked) && !right(8, "milk", "apple,milk", asked));
        assert!(right(19, "s,w", "s,w", "How do you go?") && !right(19, "s,w", "w,s", "How do you go?"));
    }

    #[test]
    fn every_published_answer_matches_itself_by_both_rules_but_for_none() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/babi");
        for task in (1..=20).map(|n| Task::new(n).unwrap()) {
            let samples = samples(&folder, task, Split::Test).unwrap();
            let (mut exact, mut label) = (0, 0);
            for s in &samples {
                exact += usize::from(exact_match(&s.question.answer, &s.question.answer));
                label += usize::from(label_match(task, &s.question.answer, &s.question.answer, &s.question.text));
            }
            let nones = samples.iter().filter(|s| task.number() == 7 && s.question.answer == "none").count();
            assert_eq!((exact, label), (samples.len(), samples.len() - nones), "{task}");
        }
    }
}
