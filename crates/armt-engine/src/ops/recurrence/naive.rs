//! The recurrences as their equations say, one sequence and one token at a time, in f64: the plain twins of this folder's operations, which
//! the tests hold the fast ones to.

/// One sequence for the selective scan of Mamba. E channels with N numbers of state each; the lengths of the slices say how many.
#[derive(Clone, Copy, Debug)]
pub struct Scan<'a> {
    /// u, `[T, E]`.
    pub u: &'a [f64],
    /// Step sizes before bias and softplus, `[T, E]`.
    pub delta: &'a [f64],
    /// Their bias, `[E]`.
    pub bias: &'a [f64],
    /// A = -exp(a_log), `[E, N]`.
    pub a_log: &'a [f64],
    /// B, `[T, N]`.
    pub b: &'a [f64],
    /// C, `[T, N]`.
    pub c: &'a [f64],
    /// D, `[E]`.
    pub d: &'a [f64],
    /// Which tokens are seen, `[T]`.
    pub seen: &'a [bool],
}

impl Scan<'_> {
    /// Gives y `[T, E]` and leaves the last state in `state`, `[E, N]`:
    ///
    /// Delta = softplus(delta + bias), S = exp(Delta A) o S + Delta u B, y = S C + D u.
    pub fn run(&self, state: &mut [f64]) -> Vec<f64> {
        let (e, n) = (self.d.len(), self.a_log.len() / self.d.len());
        let mut y = vec![0.0; self.u.len()];
        for t in (0..self.seen.len()).filter(|t| self.seen[*t]) {
            for i in 0..e {
                let u = self.u[t * e + i];
                let delta = (self.delta[t * e + i] + self.bias[i]).exp().ln_1p();
                let mut sum = self.d[i] * u;
                for j in 0..n {
                    let s = &mut state[i * n + j];
                    *s = (-delta * self.a_log[i * n + j].exp()).exp() * *s + delta * u * self.b[t * n + j];
                    sum += *s * self.c[t * n + j];
                }
                y[t * e + i] = sum;
            }
        }
        y
    }
}

/// One head of one sequence for the recurrence of RWKV-5, of N key and N value channels.
#[derive(Clone, Copy, Debug)]
pub struct Wkv<'a> {
    /// Receptance r, `[T, N]`.
    pub r: &'a [f64],
    /// Keys, `[T, N]`.
    pub k: &'a [f64],
    /// Values, `[T, N]`.
    pub v: &'a [f64],
    /// w = exp(-exp(decay)), `[N]`.
    pub decay: &'a [f64],
    /// u, the weight of the token itself, `[N]`.
    pub bonus: &'a [f64],
    /// Which tokens are seen, `[T]`.
    pub seen: &'a [bool],
}

impl Wkv<'_> {
    /// Gives y `[T, N]` and leaves the last state in `state`, `[N, N]` of keys by values:
    ///
    /// y_j = sum_i r_i (S_ij + u_i k_i v_j), then S_ij = w_i S_ij + k_i v_j.
    pub fn run(&self, state: &mut [f64]) -> Vec<f64> {
        let n = self.decay.len();
        let mut y = vec![0.0; self.r.len()];
        for t in (0..self.seen.len()).filter(|t| self.seen[*t]) {
            for i in 0..n {
                let (r, k, w) = (self.r[t * n + i], self.k[t * n + i], (-self.decay[i].exp()).exp());
                for j in 0..n {
                    let (s, kv) = (&mut state[i * n + j], k * self.v[t * n + j]);
                    y[t * n + j] += r * (*s + self.bonus[i] * kv);
                    *s = w * *s + kv;
                }
            }
        }
        y
    }
}

/// One sequence for the causal convolution of E channels, each with K weights of its own.
#[derive(Clone, Copy, Debug)]
pub struct Conv<'a> {
    /// x, `[T, E]`.
    pub x: &'a [f64],
    /// w, `[E, K]`; the last is the token's own.
    pub weight: &'a [f64],
    /// b, `[E]`.
    pub bias: &'a [f64],
    /// Which tokens are seen, `[T]`.
    pub seen: &'a [bool],
}

impl Conv<'_> {
    /// Gives y `[T, E]` and leaves the last K - 1 inputs in `tail`, `[K - 1, E]`, the oldest first:
    ///
    /// y_t = b + sum_k w_k x_(t-K+1+k).
    pub fn run(&self, tail: &mut Vec<f64>) -> Vec<f64> {
        let e = self.bias.len();
        let k = self.weight.len() / e;
        let mut y = vec![0.0; self.x.len()];
        for t in (0..self.seen.len()).filter(|t| self.seen[*t]) {
            tail.extend(&self.x[t * e..][..e]);
            for i in 0..e {
                y[t * e + i] = self.bias[i] + (0..k).map(|j| self.weight[i * k + j] * tail[j * e + i]).sum::<f64>();
            }
            tail.drain(..e);
        }
        y
    }
}
