// Threefry-2x32 with 13 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): random bits as a
// function of a key and a counter, so that they are the same for any number of threads and need no state.
#pragma once
#include <cstdint>

struct Words { uint32_t first, second; };

// Word: uint32_t, or a vector of them, whose lanes are as many counters.
template <class Word>
inline Word rotate(Word x, int bits) { return (x << bits) | (x >> (32 - bits)); }

template <class Word>
inline void threefry(Words key, Word& a, Word& b) {
  constexpr int ROTATIONS[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  const uint32_t keys[3] = {key.first, key.second, 0x1bd11bda ^ key.first ^ key.second};
  a += keys[0], b += keys[1];
#pragma GCC unroll 13
  for (int round = 0; round < 13; ++round) {
    a += b;
    b = rotate(b, ROTATIONS[round % 8]) ^ a;
    if (round % 4 == 3) {
      const int turn = round / 4 + 1;
      a += keys[turn % 3];
      b += keys[(turn + 1) % 3] + turn;
    }
  }
}

inline Words threefry(Words key, Words counter) {
  threefry(key, counter.first, counter.second);
  return counter;
}
