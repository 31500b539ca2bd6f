// y = x keep / (1 - p). keep is a hash of (seed, step, site, element): the same bits as ops/dropout.rs computes on the CPU.
__device__ __forceinline__ u64 mix64(u64 z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
__device__ __forceinline__ u32 mix32(u32 h) {
    h = (h ^ (h >> 16)) * 0x7feb352du;
    h = (h ^ (h >> 15)) * 0x846ca68bu;
    return h ^ (h >> 16);
}

// state: low and high half of the seed, step
extern "C" __global__ void dropout(const T* x, T* y, const u32* state, i64 n, u32 site, u32 threshold, float scale) {
    u64 seed = (u64)state[0] | (u64)state[1] << 32;
    u64 k = mix64(mix64(seed + 0x9e3779b97f4a7c15ull) ^ ((u64)state[2] << 32 | site));
    u32 k0 = (u32)k, k1 = (u32)(k >> 32);
    EACH(i, n) {
        u32 folded = (u32)i ^ (u32)((u64)i >> 32) * 0x9e3779b9u;
        bool keep = mix32(mix32(folded ^ k0) + k1) >= threshold;
        y[i] = from_f32<T>(keep ? to_f32(x[i]) * scale : 0.f);
    }
}

extern "C" __global__ void advance(u32* state) {
    if (threadIdx.x == 0) state[2] += 1;
}
