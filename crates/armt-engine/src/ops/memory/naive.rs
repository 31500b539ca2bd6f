//! The associative memory as its equations say, one memory and one token at a time, in f64: the plain twins of this folder's operations,
//! which the tests hold the fast ones to.
//!
//! gamma is an argument of the writes and not made by them, because it is never differentiated: whoever takes differences of a write keeps
//! the gamma of the unperturbed point.

/// Added to z . phi and to |phi|^2.
pub const EPSILON: f64 = 1e-5;

/// One memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    /// A, `[dk, d]`.
    pub a: Vec<f64>,
    /// z, `[dk]`.
    pub z: Vec<f64>,
}

/// One token to write.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Features of its key, `[dk]`.
    pub phi: Vec<f64>,
    /// Its value, `[d]`.
    pub v: Vec<f64>,
    /// Its importance, after the sigmoid.
    pub b: f64,
}

impl Token {
    /// A token from its raw key, its value, and its importance before the sigmoid.
    pub fn new(k: &[f64], v: &[f64], beta: f64, nu: usize) -> Self {
        Token { phi: dpfp(k, nu), v: v.to_vec(), b: 1.0 / (1.0 + (-beta).exp()) }
    }
}

/// x . y.
pub fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// phi(x) = [r * roll(r, 1), .., r * roll(r, nu)] with r = relu([x, -x]) and `roll(r, j)[i] = r[i - j]`, cyclic.
pub fn dpfp(x: &[f64], nu: usize) -> Vec<f64> {
    let r: Vec<f64> = x.iter().map(|x| x.max(0.0)).chain(x.iter().map(|x| (-x).max(0.0))).collect();
    let width = r.len();
    (1..=nu).flat_map(|j| (0..width).map(move |i| (i, j))).map(|(i, j)| r[i] * r[(i + width - j) % width]).collect()
}

impl Memory {
    /// A^T phi, `[d]`: what is stored at a key.
    pub fn recall(&self, phi: &[f64]) -> Vec<f64> {
        let d = self.a.len() / self.z.len();
        let mut w = vec![0.0; d];
        for (row, p) in self.a.chunks(d).zip(phi) {
            w.iter_mut().zip(row).for_each(|(w, a)| *w += p * a);
        }
        w
    }

    /// z . phi + eps.
    pub fn denominator(&self, phi: &[f64]) -> f64 {
        dot(&self.z, phi) + EPSILON
    }

    /// y = A^T phi / (z . phi + eps).
    pub fn read(&self, phi: &[f64]) -> Vec<f64> {
        let den = self.denominator(phi);
        self.recall(phi).iter().map(|w| w / den).collect()
    }

    /// clip(1 - (z . phi + eps) / (|phi|^2 + eps), 0, 1): how much of a key z does not have yet.
    pub fn gamma(&self, phi: &[f64]) -> f64 {
        (1.0 - self.denominator(phi) / (dot(phi, phi) + EPSILON)).clamp(0.0, 1.0)
    }

    /// A += phi (x) x, z += gamma phi.
    fn add(&mut self, phi: &[f64], x: &[f64], gamma: f64) {
        for ((row, z), phi) in self.a.chunks_mut(x.len()).zip(&mut self.z).zip(phi) {
            row.iter_mut().zip(x).for_each(|(a, x)| *a += phi * x);
            *z += gamma * phi;
        }
    }

    /// gamma of tokens that are all written against this memory: 1 if it is empty or z is not to be corrected.
    pub fn gammas(&self, tokens: &[Token], corrected: bool) -> Vec<f64> {
        tokens.iter().map(|t| if corrected { self.gamma(&t.phi) } else { 1.0 }).collect()
    }

    /// The paper's write: all tokens against the old memory.
    ///
    /// vbar_i = A^T phi_i / (z . phi_i + eps), A' = A + sum_i phi_i (x) b_i (v_i - vbar_i), z' = z + sum_i gamma_i phi_i.
    pub fn write(&self, tokens: &[Token], gammas: &[f64]) -> Memory {
        let mut new = self.clone();
        for (token, gamma) in tokens.iter().zip(gammas) {
            let vbar = self.read(&token.phi);
            let x: Vec<f64> = token.v.iter().zip(vbar).map(|(v, vbar)| token.b * (v - vbar)).collect();
            new.add(&token.phi, &x, *gamma);
        }
        new
    }

    /// gamma of tokens that are written in turn, each against z as the ones before it left it: 1 if z is not to be corrected, and for the
    /// first token of an empty memory.
    pub fn gammas_in_turn(&self, tokens: &[Token], corrected: bool, empty: bool) -> Vec<f64> {
        let mut memory = self.clone();
        let mut gammas = Vec::new();
        for token in tokens {
            let gamma = if corrected && !(empty && gammas.is_empty()) { memory.gamma(&token.phi) } else { 1.0 };
            memory.z.iter_mut().zip(&token.phi).for_each(|(z, phi)| *z += gamma * phi);
            gammas.push(gamma);
        }
        gammas
    }

    /// The projected write: tokens in turn, each against what the ones before it left.
    ///
    /// vbar_i = A_{i-1}^T phi_i / (|phi_i|^2 + eps), A_i = A_{i-1} + phi_i (x) b_i (v_i - vbar_i), z_i = z_{i-1} + gamma_i phi_i.
    pub fn write_projected(&self, tokens: &[Token], gammas: &[f64]) -> Memory {
        let mut memory = self.clone();
        for (token, gamma) in tokens.iter().zip(gammas) {
            let n = dot(&token.phi, &token.phi) + EPSILON;
            let stored = memory.recall(&token.phi);
            let x: Vec<f64> = token.v.iter().zip(stored).map(|(v, w)| token.b * (v - w / n)).collect();
            memory.add(&token.phi, &x, *gamma);
        }
        memory
    }
}
