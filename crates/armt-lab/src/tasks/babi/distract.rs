//! Sentences about the people, rooms and objects of the stories after which everything is as before: what someone did not do, would do
//! or thinks of, and what a book might say of a room. A reader who takes them for facts is misled.

use armt::random::Random;

use super::sentence::DIRECTIONS;
use super::simulate::{FOUR, GIVERS};
use super::world::{OBJECTS, PLACES};

/// What is said of going, taking and giving without its being done: each stands before a plain verb.
const UNDONE: [&str; 20] = [
    "did not",
    "would",
    "would not",
    "could not",
    "never did",
    "might",
    "will",
    "will not",
    "wanted to",
    "did not want to",
    "hoped to",
    "meant to",
    "refused to",
    "forgot to",
    "was told not to",
    "promised to",
    "used to",
    "was about to",
    "thought it wise to",
    "dreamed he would",
];
/// Plain verbs of the facts' own ones.
const GO: [&str; 7] = ["go to", "go back to", "move to", "journey to", "travel to", "walk to", "return to"];
const TAKE: [&str; 8] = ["get", "take", "pick up", "grab", "leave", "drop", "discard", "put down"];
const GIVE: [&str; 3] = ["give", "pass", "hand"];

/// Sentences with a room, and mostly a person: W and V are people, P and Q rooms, O is an object, D a direction.
const OF_ROOMS: [&str; 26] = [
    "W spoke of the P and said no more.",
    "W had heard a good deal about the P from V.",
    "The door of the P was painted green, which V had always disliked.",
    "There was a letter for W upon the table of the P.",
    "V asked W whether the P was still as cold as it had been.",
    "W wrote a long letter about the P to V.",
    "Nobody could tell V what W had done in the P that summer.",
    "The windows of the P look towards the Q, as W used to say.",
    "W preferred the P to the Q, and told V so.",
    "V remembered how W had laughed in the P, years ago.",
    "They said that the P belonged to W and the Q to V.",
    "If W were in the P now, V would know of it.",
    "Was W in the P, or was it V?",
    "W looked at a picture of the P and thought of the Q.",
    "From the P came the voice of someone who was not W.",
    "V believed that W was fond of the P.",
    "A man named W once built a P larger than any in the county.",
    "The old P had been burnt long before W was born.",
    "W and V quarrelled about the P all the morning.",
    "Neither W nor V had a key to the P.",
    "It was not W who went to the P.",
    "Nobody went to the P, and nobody left the Q.",
    "W asked the way to the P.",
    "The P is said to lie D of the Q, but nobody has measured it.",
    "The P is not D of the Q.",
    "W thought that the P might be D of the Q.",
];
/// Sentences with an object.
const OF_OBJECTS: [&str; 10] = [
    "W asked V for the O, and got no answer.",
    "The O was much talked of, and V was tired of it.",
    "W dreamed of the O and of the P.",
    "V wondered who had the O.",
    "W would rather have the O than anything in the P.",
    "Nobody had given the O to W.",
    "Nobody took the O, though V had feared it.",
    "It was not V who gave the O to W.",
    "W had seen an O like that once, in the P.",
    "The price of the O was more than W could pay.",
];
/// What may come before and after what was not done.
const BEFORE: [&str; 8] = ["", "", "", "In those days ", "That morning ", "After all ", "It is true that ", "They say that "];
const AFTER: [&str; 8] = ["", "", "", "", " that day", " after all", ", as everybody knew", ", or so the letter said"];

/// Such a sentence. Equal generators give equal ones.
pub fn sentence(random: &mut Random) -> String {
    let people: Vec<&str> = FOUR.iter().chain(&GIVERS).copied().collect();
    let who = one_of(&people, random);
    let other = loop {
        let other = one_of(&people, random);
        if other != who {
            break other;
        }
    };
    let (place, object) = (one_of(&PLACES, random), one_of(&OBJECTS, random));
    match random.below(8) {
        0..3 => undone(&format!("{who} {} {} the {place}", one_of(&UNDONE, random), one_of(&GO, random)), random),
        3 => undone(&format!("{who} {} {} the {object}", one_of(&UNDONE, random), one_of(&TAKE, random)), random),
        4 => undone(&format!("{who} {} {} the {object} to {other}", one_of(&UNDONE, random), one_of(&GIVE, random)), random),
        kind => {
            let form = if kind == 5 { one_of(&OF_OBJECTS, random) } else { one_of(&OF_ROOMS, random) };
            let beyond = loop {
                let beyond = one_of(&PLACES, random);
                if beyond != place {
                    break beyond;
                }
            };
            let direction = one_of(&DIRECTIONS, random);
            let words = form.split_inclusive([' ', ',', '.', '?']).map(|word| {
                let (letters, end) = word.split_at(word.trim_end_matches([' ', ',', '.', '?']).len());
                let said = match letters {
                    "W" => who,
                    "V" => other,
                    "P" => place,
                    "Q" => beyond,
                    "O" => object,
                    "D" => direction,
                    letters => letters,
                };
                format!("{said}{end}")
            });
            words.collect()
        }
    }
}

fn undone(said: &str, random: &mut Random) -> String {
    format!("{}{said}{}.", one_of(&BEFORE, random), one_of(&AFTER, random))
}

fn one_of<'a>(words: &[&'a str], random: &mut Random) -> &'a str {
    words[random.below(words.len())]
}

#[cfg(test)]
mod tests {
    use super::super::sentence::Event;
    use super::*;

    #[test]
    fn none_is_a_fact_and_all_name_something_of_the_stories() {
        let mut random = Random::new(1);
        let mut seen = std::collections::HashSet::new();
        for _ in 0..5000 {
            let said = sentence(&mut random);
            // What nobody did has the words of a fact, and is none.
            assert!(said.starts_with("Nobody ") || Event::read(&said).is_none(), "{said}");
            let names = PLACES.iter().chain(&OBJECTS).chain(&FOUR).chain(&GIVERS).filter(|name| said.contains(**name)).count();
            assert!(names > 0, "{said}");
            assert!(!said.split([' ', ',', '.', '?']).any(|word| ["W", "V", "P", "Q", "O", "D"].contains(&word)), "{said}");
            seen.insert(said);
        }
        assert!(seen.len() > 3000, "{} different ones", seen.len());
    }
}
