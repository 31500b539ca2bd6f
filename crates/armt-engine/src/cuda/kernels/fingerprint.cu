// A sum that depends on every word and its place but not on the order of adding, and the number of words that are zero.

KERNEL(fingerprint)(const unsigned short* words, long long n, unsigned long long* sums) {
  unsigned long long sum = 0, zeros = 0;
  const long long stride = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
    const unsigned word = words[i];
    // splitmix64's mixing of the place and the word.
    unsigned long long x = ((unsigned long long)i << 16 | word) + 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    sum += x ^ x >> 31;
    zeros += word == 0;
  }
  for (int lane = 16; lane > 0; lane /= 2) {
    sum += __shfl_down_sync(0xffffffffu, sum, lane);
    zeros += __shfl_down_sync(0xffffffffu, zeros, lane);
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(sums, sum);
    atomicAdd(sums + 1, zeros);
  }
}
