//! The sentences of tasks 1 to 5: what happens in them, and the words that say so.

/// Words of a move, all alike: `Mary went to the garden.`
pub(super) const MOVES: [&str; 5] = ["went to", "went back to", "moved to", "journeyed to", "travelled to"];
/// Words of taking an object: `Mary got the milk there.`
pub(super) const GETS: [&str; 4] = ["got", "took", "picked up", "grabbed"];
/// Words of leaving one: `Mary dropped the milk.`
pub(super) const DROPS: [&str; 4] = ["left", "dropped", "discarded", "put down"];
/// Words of handing one over: `Mary gave the milk to Fred.`
pub(super) const GIVES: [&str; 3] = ["gave", "passed", "handed"];
/// Directions, each two beside its opposite.
pub(super) const DIRECTIONS: [&str; 4] = ["north", "south", "east", "west"];

/// What a fact says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event<'a> {
    /// Someone goes somewhere.
    Move { who: &'a str, place: &'a str },
    /// Someone takes an object from where both are.
    Get { who: &'a str, object: &'a str },
    /// Someone leaves an object where he is.
    Drop { who: &'a str, object: &'a str },
    /// Someone hands an object to another.
    Give { who: &'a str, object: &'a str, to: &'a str },
    /// A place lies beside another, `The kitchen is north of the garden.`
    Lies { place: &'a str, direction: &'a str, of: &'a str },
}

impl<'a> Event<'a> {
    /// What a sentence says; `None` if it is none of these.
    pub fn read(sentence: &'a str) -> Option<Self> {
        let said = sentence.trim().strip_suffix('.')?;
        if let Some((place, rest)) = said.strip_prefix("The ").and_then(|s| s.split_once(" is ")) {
            let (direction, of) = rest.split_once(" of the ")?;
            return DIRECTIONS.contains(&direction).then_some(Event::Lies { place: word(place)?, direction, of: word(of)? });
        }
        let (who, rest) = said.split_once(' ')?;
        let (verb, what) = rest.split_once(" the ")?;
        if MOVES.contains(&verb) {
            return Some(Event::Move { who, place: word(what)? });
        }
        if GIVES.contains(&verb) {
            let (object, to) = what.split_once(" to ")?;
            return Some(Event::Give { who, object: word(object)?, to: word(to)? });
        }
        let object = word(what.strip_suffix(" there").unwrap_or(what))?;
        if GETS.contains(&verb) {
            return Some(Event::Get { who, object });
        }
        DROPS.contains(&verb).then_some(Event::Drop { who, object })
    }
}

/// The text itself if it is one word.
pub(super) fn word(text: &str) -> Option<&str> {
    (!text.is_empty() && !text.contains(char::is_whitespace)).then_some(text)
}

/// The direction back.
pub(super) fn opposite(direction: &str) -> Option<&'static str> {
    DIRECTIONS.iter().position(|d| *d == direction).map(|i| DIRECTIONS[i ^ 1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wording_is_read() {
        for verb in MOVES {
            let text = format!("Mary {verb} the garden.");
            assert_eq!(Event::read(&text), Some(Event::Move { who: "Mary", place: "garden" }));
        }
        for there in ["", " there"] {
            for verb in GETS {
                let text = format!("Mary {verb} the milk{there}.");
                assert_eq!(Event::read(&text), Some(Event::Get { who: "Mary", object: "milk" }));
            }
            for verb in DROPS {
                let text = format!("Mary {verb} the milk{there}.");
                assert_eq!(Event::read(&text), Some(Event::Drop { who: "Mary", object: "milk" }));
            }
        }
        for verb in GIVES {
            let text = format!("Mary {verb} the milk to Fred.");
            assert_eq!(Event::read(&text), Some(Event::Give { who: "Mary", object: "milk", to: "Fred" }));
        }
        let lies = Event::Lies { place: "office", direction: "west", of: "hallway" };
        assert_eq!(Event::read("The office is west of the hallway."), Some(lies));
    }

    #[test]
    fn other_sentences_are_not() {
        for other in [
            "",
            "Mary.",
            "Mary is in the garden.",
            "Mary went to the garden",
            "The office is above of the hallway.",
            "Mary saw the milk.",
        ] {
            assert_eq!(Event::read(other), None, "{other}");
        }
    }

    #[test]
    fn directions_have_their_opposites() {
        for d in DIRECTIONS {
            assert_eq!(opposite(opposite(d).unwrap()), Some(d));
        }
        assert_eq!((opposite("north"), opposite("west"), opposite("up")), (Some("south"), Some("east"), None));
    }
}
