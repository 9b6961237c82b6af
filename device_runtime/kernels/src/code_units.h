// Codes of 2 to 8 bits, packed in units.
//
// A unit has `quads` times four inputs of a channel in `words` words of 32 bits, and byte i of a word is of the inputs
// i, 4 + i, 8 + i ... As many codes as fit are adjacent, from the lowest bit of a byte on. The bits that are left
// make up the last codes of the unit, from their lowest bits on. So four codes are unpacked by few instructions.
#pragma once

#include <cstdint>

namespace edgellm {

struct CodeUnit {
  int words, quads;
  int whole, rest;  // of a byte: codes that fit, and bits that are left
};

constexpr CodeUnit unit_of(int bits) {
  const int common = bits & -bits;  // with 8
  return {bits / common, 8 / common, 8 / bits, 8 % bits};
}

// Bits of a byte that are bits `to` to `to + width` of a code.
struct CodePiece {
  int word, from, width, to;
};

// The piece of a quad's codes that begins with their bit `to`; whole codes are a single piece.
constexpr CodePiece piece_of(int bits, int quad, int to) {
  const CodeUnit unit = unit_of(bits);
  const int apart = quad - unit.words * unit.whole;
  if (apart < 0) return {quad / unit.whole, quad % unit.whole * bits, bits, 0};
  const int at = apart * bits + to, used = at % unit.rest;
  const int left = unit.rest - used, width = left < bits - to ? left : bits - to;
  return {at / unit.rest, 8 - unit.rest + used, width, to};
}

// The code of an input of one of `channels` channels, whose units begin at `first`.
inline int code_at(int bits, const uint8_t* first, int64_t channels, int64_t channel, int64_t input) {
  const CodeUnit unit = unit_of(bits);
  const int64_t place = input / 4 / unit.quads, quad = input / 4 % unit.quads;
  const uint8_t* bytes = first + (place * unit.words * channels + channel) * 4 + input % 4;
  int code = 0;
  for (int to = 0; to < bits;) {
    const CodePiece piece = piece_of(bits, int(quad), to);
    code |= (bytes[piece.word * 4 * channels] >> piece.from & ((1 << piece.width) - 1)) << to;
    to += piece.width;
  }
  return code;
}

}  // namespace edgellm
