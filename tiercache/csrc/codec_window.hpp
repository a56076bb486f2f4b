// The window codec, written once for host and device: a bf16's sign and mantissa as a byte, its exponent as
// three bits above the base of its group of 64, or an escaped byte.
//
// body  := u8 sign_mantissa[64 g], u8 base[g], planes[g], u32 first_escape[ceil(g / 64)], u8 escapes[],
//          the elements that fill no group (2 bytes each); g groups of 64 elements
// planes := u64 bit0, bit1, bit2 of the 64 codes; code 7 is an escape
// `first_escape` counts the escapes before each 64 groups, so that groups can be decoded in any order.
#pragma once
#include "codec_device.hpp"

namespace tiercache::codec {

constexpr int kGroup = 64;      // elements that share a base
constexpr int kSuper = 64;      // groups that share an entry of first_escape
constexpr int kWindow = 7;      // exponents that have a code
constexpr int kCandidates = 8;  // bases that are tried

// Byte offsets of the parts of a body of `groups` groups.
struct WindowLayout {
  u64 groups;
  TC_HD u64 rest() const { return 0; }
  TC_HD u64 base() const { return 64 * groups; }
  TC_HD u64 planes() const { return 65 * groups; }
  TC_HD u64 first_escape() const { return 89 * groups; }
  TC_HD u64 supers() const { return (groups + kSuper - 1) / kSuper; }
  TC_HD u64 escapes() const { return first_escape() + 4 * supers(); }
};

// The base that leaves the fewest escapes: the largest exponent of the group less 6, 7, ... 13; the first of
// equals.
TC_HD u8 window_base(const u8* exponents) {
  int most = 0;
  for (int i = 0; i < kGroup; ++i) most = exponents[i] > most ? exponents[i] : most;
  int inside[kCandidates] = {};
  for (int i = 0; i < kGroup; ++i)
    for (int k = 0; k < kCandidates; ++k) {
      const u8 code = static_cast<u8>(exponents[i] - (most - (kWindow - 1) - k));
      inside[k] += code < kWindow;
    }
  int best = 0;
  for (int k = 1; k < kCandidates; ++k)
    if (inside[k] > inside[best]) best = k;
  return static_cast<u8>(most - (kWindow - 1) - best);
}

// Writes all of a group but its escapes; returns how many it has.
TC_HD u32 window_encode_group(const u16* x, u8* body, WindowLayout at, u64 group) {
  u8 exponents[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    const u16 word = x[group * kGroup + static_cast<u64>(i)];
    exponents[i] = static_cast<u8>(word >> 7);
    body[at.rest() + group * kGroup + static_cast<u64>(i)] = static_cast<u8>(word << 1 | word >> 15);
  }
  const u8 base = window_base(exponents);
  body[at.base() + group] = base;
  u64 plane[3] = {};
  for (int i = 0; i < kGroup; ++i) {
    const u8 distance = static_cast<u8>(exponents[i] - base);
    const u64 code = distance < kWindow ? distance : kWindow;
    for (int b = 0; b < 3; ++b) plane[b] |= (code >> b & 1u) << i;
  }
  for (int b = 0; b < 3; ++b) write_u64(body + at.planes() + group * 24 + static_cast<u64>(8 * b), plane[b]);
  return static_cast<u32>(popcount(plane[0] & plane[1] & plane[2]));
}

// Which elements of a group are escaped.
TC_HD u64 window_escaped(const u8* body, WindowLayout at, u64 group) {
  const u8* planes = body + at.planes() + group * 24;
  return read_u64(planes) & read_u64(planes + 8) & read_u64(planes + 16);
}

// Index of a group's first escape: what first_escape says and the escapes of the groups since.
TC_HD u64 window_first_escape(const u8* body, WindowLayout at, u64 group) {
  u64 index = read_u32(body + at.first_escape() + group / kSuper * 4);
  for (u64 g = group / kSuper * kSuper; g < group; ++g)
    index += static_cast<u64>(popcount(window_escaped(body, at, g)));
  return index;
}

// Writes a group's escapes, once first_escape is filled in.
TC_HD void window_encode_escapes(const u16* x, u8* body, WindowLayout at, u64 group) {
  const u64 escaped = window_escaped(body, at, group);
  if (escaped == 0) return;
  u8* to = body + at.escapes() + window_first_escape(body, at, group);
  for (int i = 0; i < kGroup; ++i)
    if (escaped >> i & 1u) *to++ = static_cast<u8>(x[group * kGroup + static_cast<u64>(i)] >> 7);
}

// Puts a group together. Escapes past `num_escapes` read as 0; false when there were such.
TC_HD bool window_decode_group(const u8* body, WindowLayout at, u64 group, u64 num_escapes, u16* x) {
  const u8* planes = body + at.planes() + group * 24;
  const u64 p0 = read_u64(planes);
  const u64 p1 = read_u64(planes + 8);
  const u64 p2 = read_u64(planes + 16);
  const u8 base = body[at.base() + group];
  u64 next = (p0 & p1 & p2) != 0 ? window_first_escape(body, at, group) : 0;
  bool good = true;
  for (int i = 0; i < kGroup; ++i) {
    const u32 code = static_cast<u32>((p0 >> i & 1u) | (p1 >> i & 1u) << 1 | (p2 >> i & 1u) << 2);
    u8 exponent = static_cast<u8>(base + code);
    if (code == kWindow) {
      exponent = next < num_escapes ? body[at.escapes() + next] : u8{0};
      good = good && next < num_escapes;
      ++next;
    }
    const u8 rest = body[at.rest() + group * kGroup + static_cast<u64>(i)];
    x[group * kGroup + static_cast<u64>(i)] = static_cast<u16>(exponent << 7 | rest >> 1 | (rest & 1) << 15);
  }
  return good;
}

}  // namespace tiercache::codec
