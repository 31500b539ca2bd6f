//! The command `armt`.

fn main() {}
