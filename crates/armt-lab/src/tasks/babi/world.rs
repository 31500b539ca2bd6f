//! The little world of tasks 1, 2, 3 and 5: four people, three objects, six rooms, and what may happen next.
//!
//! What happens is drawn until it is possible, as in the published stories: a kind, all alike; then for a move a person and a room
//! that he is not in; for taking or leaving a person and, if there is one, an object in reach; for giving any holder who
//! is not alone, one of his objects and one of the others there. Measured on the published stories, this gives their odds: taking is
//! 6/5 as likely as moving for a person who can take something, and giving 6/5 as likely whoever can. Where one gift follows another
//! it is always of the same object, and nearly always back: to a third person in one of forty, which is one of six where there is one.
//!
//! Where people and objects are at first is drawn too and never told.

use armt::random::Random;

use super::sentence::Event;

/// Rooms.
pub(super) const PLACES: [&str; 6] = ["bedroom", "kitchen", "garden", "hallway", "bathroom", "office"];
/// Things that are carried about.
pub(super) const OBJECTS: [&str; 3] = ["apple", "football", "milk"];
/// People of a story.
pub(super) const PEOPLE: usize = 4;

/// What may happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Happening {
    Move,
    Get,
    Drop,
    Give,
}

/// Who is where and has what.
#[derive(Clone, Debug)]
pub(super) struct World {
    names: [&'static str; PEOPLE],
    kinds: &'static [Happening],
    /// The place of each person.
    at: [usize; PEOPLE],
    /// The place of each object that nobody holds.
    lies: [usize; OBJECTS.len()],
    holder: [Option<usize>; OBJECTS.len()],
    /// What was given and by whom, if that happened last.
    just_given: Option<(usize, usize)>,
}

impl World {
    /// A world in which everybody and everything is somewhere.
    pub fn new(names: [&'static str; PEOPLE], kinds: &'static [Happening], random: &mut Random) -> Self {
        World {
            names,
            kinds,
            at: std::array::from_fn(|_| random.below(PLACES.len())),
            lies: std::array::from_fn(|_| random.below(PLACES.len())),
            holder: [None; OBJECTS.len()],
            just_given: None,
        }
    }

    /// The next thing that happens; it has happened then.
    pub fn next(&mut self, random: &mut Random) -> Event<'static> {
        loop {
            if let Some(event) = self.happen(self.kinds[random.below(self.kinds.len())], random) {
                if !matches!(event, Event::Give { .. }) {
                    self.just_given = None;
                }
                return event;
            }
        }
    }

    /// Something of a kind, if what is drawn is possible.
    fn happen(&mut self, kind: Happening, random: &mut Random) -> Option<Event<'static>> {
        if kind == Happening::Give {
            return self.give(random);
        }
        let person = random.below(PEOPLE);
        let who = self.names[person];
        if kind == Happening::Move {
            let place = random.below(PLACES.len());
            if self.at[person] == place {
                return None;
            }
            self.at[person] = place;
            return Some(Event::Move { who, place: PLACES[place] });
        }
        let in_reach = |o: &usize| match kind {
            Happening::Get => self.holder[*o].is_none() && self.lies[*o] == self.at[person],
            _ => self.holder[*o] == Some(person),
        };
        let object = pick((0..OBJECTS.len()).filter(in_reach), random)?;
        if kind == Happening::Get {
            self.holder[object] = Some(person);
            return Some(Event::Get { who, object: OBJECTS[object] });
        }
        (self.holder[object], self.lies[object]) = (None, self.at[person]);
        Some(Event::Drop { who, object: OBJECTS[object] })
    }

    fn give(&mut self, random: &mut Random) -> Option<Event<'static>> {
        let together = |o: usize, to: usize| self.holder[o].filter(|h| *h != to && self.at[*h] == self.at[to]).map(|h| (o, h, to));
        let possible = (0..OBJECTS.len()).flat_map(|o| (0..PEOPLE).filter_map(move |to| together(o, to)));
        let (object, who, to) = match self.just_given {
            None => pick(possible, random)?,
            Some((object, giver)) => {
                let on = pick(possible.filter(|(o, _, to)| *o == object && *to != giver), random).filter(|_| random.below(6) == 0);
                on.or_else(|| together(object, giver))?
            }
        };
        self.holder[object] = Some(to);
        self.just_given = Some((object, who));
        Some(Event::Give { who: self.names[who], object: OBJECTS[object], to: self.names[to] })
    }

    /// The true place of an object, told or not.
    #[cfg(test)]
    pub fn place_of(&self, object: &str) -> Option<&'static str> {
        let o = OBJECTS.iter().position(|name| *name == object)?;
        Some(PLACES[self.holder[o].map_or(self.lies[o], |h| self.at[h])])
    }
}

/// One of some things, all alike; none of none.
fn pick<T>(some: impl Iterator<Item = T>, random: &mut Random) -> Option<T> {
    let mut some: Vec<T> = some.collect();
    if some.is_empty() { None } else { Some(some.swap_remove(random.below(some.len()))) }
}

#[cfg(test)]
mod tests {
    use super::super::solve::Knowledge;
    use super::*;

    const NAMES: [&str; PEOPLE] = ["John", "Mary", "Sandra", "Daniel"];

    #[test]
    fn what_a_reader_concludes_is_true() {
        let (mut random, mut told) = (Random::new(1), 0);
        for _ in 0..50 {
            let mut world = World::new(NAMES, &[Happening::Move, Happening::Get, Happening::Drop, Happening::Give], &mut random);
            let mut facts = Vec::new();
            for _ in 0..60 {
                facts.push(match world.next(&mut random) {
                    Event::Move { who, place } => format!("{who} went to the {place}."),
                    Event::Get { who, object } => format!("{who} got the {object}."),
                    Event::Drop { who, object } => format!("{who} left the {object}."),
                    Event::Give { who, object, to } => format!("{who} gave the {object} to {to}."),
                    Event::Lies { .. } => panic!("places do not move"),
                });
                let known = Knowledge::of(&facts).unwrap();
                for object in OBJECTS {
                    let place = known.answers(&format!("Where is the {object}?")).unwrap();
                    told += place.len();
                    assert!(place.first().is_none_or(|a| Some(a.text.as_str()) == world.place_of(object)), "{facts:?}");
                }
            }
        }
        assert!(told > 50 * 60 * OBJECTS.len() / 2, "most places get known: {told} of 9000");
    }

    #[test]
    fn nobody_goes_where_he_is_nor_gives_to_himself() {
        let mut random = Random::new(2);
        let mut world = World::new(NAMES, &[Happening::Move, Happening::Get, Happening::Drop, Happening::Give], &mut random);
        let mut places = std::collections::HashMap::new();
        for _ in 0..5000 {
            match world.next(&mut random) {
                Event::Move { who, place } => assert_ne!(places.insert(who, place), Some(place)),
                Event::Give { who, to, .. } => assert_ne!(who, to),
                _ => {}
            }
        }
    }
}
