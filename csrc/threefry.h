// Threefry-2x32 with 13 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): random bits as a
// function of a key and a counter, so that they are the same for any number of threads and need no state.
#pragma once
#include <cstdint>

struct Words { uint32_t first, second; };

template <class Word>
inline Word rotate(Word x, int bits) { return (x << bits) | (x >> (32 - bits)); }

// Word: uint32_t, or a vector of them, whose lanes are as many counters. Every step waits for the one before, so several
// words go through them side by side.
template <class Word, int SIDES>
inline void threefry(Words key, Word (&a)[SIDES], Word (&b)[SIDES]) {
  constexpr int ROTATIONS[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  const uint32_t keys[3] = {key.first, key.second, 0x1bd11bda ^ key.first ^ key.second};
  for (int i = 0; i < SIDES; ++i) a[i] += keys[0], b[i] += keys[1];
#pragma GCC unroll 13
  for (int round = 0; round < 13; ++round) {
#pragma GCC unroll 4
    for (int i = 0; i < SIDES; ++i) {
      a[i] += b[i];
      b[i] = rotate(b[i], ROTATIONS[round % 8]) ^ a[i];
    }
    if (round % 4 == 3) {
      const int turn = round / 4 + 1;
#pragma GCC unroll 4
      for (int i = 0; i < SIDES; ++i) a[i] += keys[turn % 3], b[i] += keys[(turn + 1) % 3] + turn;
    }
  }
}

inline Words threefry(Words key, Words counter) {
  uint32_t a[1] = {counter.first}, b[1] = {counter.second};
  threefry(key, a, b);
  return {a[0], b[0]};
}
