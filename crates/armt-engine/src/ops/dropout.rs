//! Dropout with a seeded, counter-based generator.
