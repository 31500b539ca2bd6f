//! The published bAbI files (v1.2), one a task and split, in the folder `en-10k` or `en`.
//!
//! A line is `n sentence`, or for a question `n question<tab>answer<tab>supports`. n counts the lines of a story from 1, questions
//! included, and the supports are such numbers: here they become places among the facts.

use std::fmt;
use std::path::{Path, PathBuf};

use super::{Asked, Question, Sample, Story, Task};
use crate::error::{Error, Result};

/// Which of a task's two files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// 10,000 questions; 1,000 in `en`.
    Train,
    /// 1,000 questions.
    Test,
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Split::Train { "train" } else { "test" })
    }
}

/// The file of a task in a folder, or in `en-10k` or `en` within it: `qa1_single-supporting-fact_test.txt`, or any other name between
/// the number and the split. Where there is none, or more than one in a folder, that is an error that says what was looked for.
pub fn find(folder: &Path, task: Task, split: Split) -> Result<PathBuf> {
    let (start, end) = (format!("{task}_"), format!("{split}.txt"));
    for inner in ["", "en-10k", "en"] {
        let place = if inner.is_empty() { folder.to_path_buf() } else { folder.join(inner) };
        let entries = match std::fs::read_dir(&place) {
            Ok(entries) => entries,
            Err(source) if inner.is_empty() => return Err(Error::Io { path: place, source }),
            Err(_) => continue,
        };
        let mut found = Vec::new();
        for entry in entries {
            let name = entry.map_err(|source| Error::Io { path: place.clone(), source })?.file_name();
            if name.to_str().is_some_and(|n| n.starts_with(&start) && n.ends_with(&end)) {
                found.push(place.join(name));
            }
        }
        match found.len() {
            0 => {}
            1 => return Ok(found.swap_remove(0)),
            n => return Err(Error::file(&place, format!("expected one file {start}*_{end}, found {n}"))),
        }
    }
    Err(Error::file(folder, format!("expected a bAbI file {start}*_{end} here or in en-10k or en, found none")))
}

/// The stories of a file. Anything that is no bAbI file is refused with the line where that shows.
pub fn read(path: &Path) -> Result<Vec<Story>> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })?;
    let stories = parse(&text).map_err(|(line, message)| Error::file(path, format!("line {line}: {message}")))?;
    if !text.is_empty() && !text.ends_with('\n') {
        return Err(Error::file(path, format!("line {}: it ends within a line: the file was cut short", text.lines().count())));
    }
    if stories.is_empty() {
        return Err(Error::file(path, "it is empty: expected stories"));
    }
    Ok(stories)
}

/// One sample for each question of a task's file in a folder, in the file's order.
pub fn samples(folder: &Path, task: Task, split: Split) -> Result<Vec<Sample>> {
    let path = find(folder, task, split)?;
    let samples: Vec<Sample> = read(&path)?.iter().flat_map(Story::samples).collect();
    if samples.is_empty() {
        return Err(Error::file(&path, "it has no question"));
    }
    Ok(samples)
}

/// The stories of a text, or the number of the first wrong line and what is wrong with it.
fn parse(text: &str) -> Result<Vec<Story>, (usize, String)> {
    let mut stories: Vec<Story> = Vec::new();
    // The place among the facts of each line of the current story; a question has none.
    let mut places: Vec<Option<usize>> = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let wrong = |message: String| (i + 1, message);
        let number = line.split_once(' ').and_then(|(n, rest)| Some((n.parse::<usize>().ok()?, rest)));
        let (number, rest) = number.ok_or_else(|| wrong(format!("expected a number, a space and a sentence, got '{line}'")))?;
        if number == 1 {
            expect_asked(&places).map_err(&wrong)?;
            stories.push(Story::default());
            places.clear();
        } else if number != places.len() + 1 || stories.is_empty() {
            let next = if stories.is_empty() { String::new() } else { format!(" or {}", places.len() + 1) };
            return Err(wrong(format!("expected number 1{next}, got {number}")));
        }
        let Some(story) = stories.last_mut() else { continue };
        let mut fields = rest.split('\t');
        let sentence = fields.next().unwrap_or_default().trim();
        if sentence.is_empty() {
            return Err(wrong("expected a sentence after the number, got nothing".into()));
        }
        let Some(answer) = fields.next().map(str::trim) else {
            places.push(Some(story.facts.len()));
            story.facts.push(sentence.into());
            continue;
        };
        let supports = fields.next().unwrap_or_default();
        if answer.is_empty() || fields.next().is_some() {
            return Err(wrong(format!("expected a question, an answer and supports between tabs, got '{rest}'")));
        }
        let support = |n: &str| {
            let place = n.parse::<usize>().ok().and_then(|n| places.get(n.checked_sub(1)?).copied().flatten());
            place.ok_or_else(|| wrong(format!("expected supports to be numbers of earlier facts of the story, got '{n}'")))
        };
        let supports = supports.split_whitespace().map(support).collect::<Result<Vec<_>, _>>()?;
        let question = Question { text: sentence.into(), answer: answer.into(), supports };
        places.push(None);
        story.questions.push(Asked { after: story.facts.len(), question });
    }
    expect_asked(&places).map_err(|message| (text.lines().count(), message))?;
    Ok(stories)
}

/// Refuses a story that ends with a fact: every one ends with a question, so that its end was lost.
fn expect_asked(places: &[Option<usize>]) -> Result<(), String> {
    match places.last() {
        Some(Some(_)) => Err("expected a question at a story's end, got a fact: the story was cut short".into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = "1 Mary got the milk there.\n2 John moved to the bedroom.\n3 Where is John? \tbedroom\t2\n4 Mary went to the hallway.\n\
                       5 Where is the milk? \thallway\t1 4\n1 The office is east of the garden.\n2 What is east of the garden?\toffice\t1\n";

    #[test]
    fn supports_become_places_among_the_facts() {
        let stories = parse(TWO).unwrap();
        assert_eq!(stories.len(), 2);
        assert_eq!(stories[0].facts[2], "Mary went to the hallway.");
        let milk = &stories[0].questions[1];
        assert_eq!((milk.after, milk.question.supports.as_slice()), (3, [0, 2].as_slice()));
        assert_eq!((milk.question.text.as_str(), milk.question.answer.as_str()), ("Where is the milk?", "hallway"));
        assert_eq!(stories[1].questions[0].question.supports, [0]);
        assert_eq!(parse(&TWO.replace('\n', "\r\n")).unwrap(), stories);
    }

    #[test]
    fn a_wrong_line_is_named() {
        for (text, line, part) in [
            ("Mary went to the hallway.\n", 1, "expected a number"),
            ("2 Mary went to the hallway.\n", 1, "expected number 1, got 2"),
            ("1 Mary went to the hallway.\n3 Mary went to the office.\n", 2, "expected number 1 or 2, got 3"),
            ("1 \n", 1, "expected a sentence"),
            ("1 A.\n2 Where? \t\t1\n", 2, "a question, an answer"),
            ("1 A.\n2 Where? \there\t1\tmore\n", 2, "a question, an answer"),
            ("1 A.\n2 Where? \there\t2\n", 2, "got '2'"),
            ("1 A.\n2 Where? \there\t1 0\n", 2, "got '0'"),
            ("1 A.\n2 Where? \there\t1\n3 Where? \there\t2\n", 3, "numbers of earlier facts"),
            ("1 A.\n2 Where? \there\tx\n", 2, "got 'x'"),
        ] {
            let (at, message) = parse(text).unwrap_err();
            assert!(at == line && message.contains(part), "{text:?}: line {at}: {message}");
        }
    }

    #[test]
    fn a_file_that_was_cut_short_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qa1_one_test.txt");
        let ends: Vec<usize> = TWO.match_indices('\n').map(|(at, _)| at + 1).collect();
        for cut in 1..TWO.len() {
            std::fs::write(&path, &TWO[..cut]).unwrap();
            let asked = ends.contains(&cut) && TWO[..cut].lines().last().is_some_and(|line| line.contains('\t'));
            assert_eq!(read(&path).is_ok(), asked, "{}", &TWO[..cut]);
        }
        let lost = TWO.replacen("5 Where is the milk? \thallway\t1 4\n", "", 1);
        std::fs::write(&path, lost).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("line 5: expected a question at a story's end"));
    }

    #[test]
    fn files_are_found_by_task_and_split_and_mistakes_name_them() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("en-10k");
        std::fs::create_dir(&inner).unwrap();
        for name in ["qa1_one_test.txt", "qa11_eleven_test.txt", "qa1_one_train.txt"] {
            std::fs::write(inner.join(name), TWO).unwrap();
        }
        let task = Task::new(1).unwrap();
        assert_eq!(find(folder.path(), task, Split::Test).unwrap(), inner.join("qa1_one_test.txt"));
        assert_eq!(find(&inner, task, Split::Train).unwrap(), inner.join("qa1_one_train.txt"));
        assert_eq!(samples(folder.path(), task, Split::Test).unwrap().len(), 3);
        let missing = find(folder.path(), Task::new(2).unwrap(), Split::Test).unwrap_err().to_string();
        assert!(missing.contains("qa2_*_test.txt"), "{missing}");
        std::fs::write(inner.join("qa1_one_test.txt"), "1 A.\n\n7 B.\n").unwrap();
        let wrong = samples(folder.path(), task, Split::Test).unwrap_err().to_string();
        assert!(wrong.contains("qa1_one_test.txt: line 3: expected number 1 or 2, got 7"), "{wrong}");
        std::fs::write(inner.join("qa1_more_test.txt"), TWO).unwrap();
        assert!(find(folder.path(), task, Split::Test).unwrap_err().to_string().contains("found 2"));
    }
}
