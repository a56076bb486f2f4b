// The steps of the device codecs, one thread's share each, in the order in which kernels run them: groups,
// counts, scan, rest. codec_kernels.cu gives each thread its index; codec_emulate.cpp runs every index on the
// host, so that the bits are checked without a card. Lengths stay where they are computed.
#pragma once
#include "codec_quant.hpp"
#include "codec_window.hpp"

namespace tiercache::codec {

constexpr int kScanThreads = 1024;  // one block scans all counts

// Thread t's share of n counts.
TC_HD u64 scan_begin(u64 n, int t) { return n * static_cast<u64>(t) / kScanThreads; }

// First half: sums of the shares. Then thread 0 runs scan_partials, then all run scan_write.
TC_HD void scan_share(const u8* counts, u64 n, int t, u64* partial) {
  u64 sum = 0;
  for (u64 i = scan_begin(n, t); i < scan_begin(n, t + 1); ++i) sum += read_u32(counts + 4 * i);
  partial[t] = sum;
}

// Shares become what is before them; length[0] = fixed + unit * total.
TC_HD void scan_partials(u64* partial, u64 fixed, u64 unit, u64* length) {
  u64 sum = 0;
  for (int t = 0; t < kScanThreads; ++t) {
    const u64 share = partial[t];
    partial[t] = sum;
    sum += share;
  }
  length[0] = fixed + unit * sum;
}

// Counts become what is before them.
TC_HD void scan_write(u8* counts, u64 n, int t, const u64* partial) {
  u64 sum = partial[t];
  for (u64 i = scan_begin(n, t); i < scan_begin(n, t + 1); ++i) {
    const u64 count = read_u32(counts + 4 * i);
    write_u32(counts + 4 * i, static_cast<u32>(sum));
    sum += count;
  }
}

// Escapes of 64 groups, into first_escape.
TC_HD void window_count(u8* body, WindowLayout at, u64 super) {
  const u64 end = (super + 1) * kSuper < at.groups ? (super + 1) * kSuper : at.groups;
  u32 count = 0;
  for (u64 g = super * kSuper; g < end; ++g) count += static_cast<u32>(popcount(window_escaped(body, at, g)));
  write_u32(body + at.first_escape() + 4 * super, count);
}

// A group's escapes and, from thread 0, the tail; nothing when the body of `length` bytes does not fit.
TC_HD void window_finish(const u16* x, u64 n, u8* body, u64 room, u64 length, u64 thread) {
  const WindowLayout at{n / kGroup};
  if (length > room) return;
  if (thread < at.groups) window_encode_escapes(x, body, at, thread);
  if (thread != 0) return;
  u8* to = body + length - 2 * (n % kGroup);
  for (u64 i = at.groups * kGroup; i < n; ++i, to += 2) write_u16(to, x[i]);
}

// Decodes a group and, in thread 0, the tail. `bad` is set when the body can't be what an encoder wrote.
TC_HD void window_decode_step(const u8* body, u64 length, u64 n, u16* x, u64 thread, u32* bad) {
  const WindowLayout at{n / kGroup};
  const u64 tail = n % kGroup;
  if (length < at.escapes() + 2 * tail) {
    *bad = 1;
    return;
  }
  const u64 num_escapes = length - at.escapes() - 2 * tail;
  if (thread < at.groups && !window_decode_group(body, at, thread, num_escapes, x)) *bad = 1;
  if (thread != 0) return;
  const u8* from = body + length - 2 * tail;
  for (u64 i = at.groups * kGroup; i < n; ++i, from += 2) x[i] = static_cast<u16>(from[0] | from[1] << 8);
}

// Exceptions among 64 groups, into a count of its own.
TC_HD void quant_count(const u8* body, int scale_bytes, u64 groups, u64 super, u8* counts) {
  const u64 end = (super + 1) * kSuper < groups ? (super + 1) * kSuper : groups;
  u32 count = 0;
  for (u64 g = super * kSuper; g < end; ++g) count += is_exception(body, scale_bytes, g);
  write_u32(counts + 4 * super, count);
}

// Writes a group's exception where the scanned counts put it; nothing when the body does not fit.
template <class Format, class Element>
TC_HD void quant_finish(const typename Element::Word* x, QuantShape s, u8* body, u64 room, u64 length,
                        const u8* counts, u64 group) {
  if (length > room || group >= s.groups() || !is_exception(body, Format::kScaleBytes, group)) return;
  u64 rank = read_u32(counts + group / kSuper * 4);
  for (u64 g = group / kSuper * kSuper; g < group; ++g) rank += is_exception(body, Format::kScaleBytes, g);
  quant_write_exception<Format, Element>(x, s, group, rank, body);
}

template <class Format, class Element>
TC_HD void quant_decode_step(const u8* body, u64 length, QuantShape s, typename Element::Word* x, u64 group,
                             u32* bad) {
  const u64 fixed = quant_fixed_bytes<Format>(s);
  if (length < fixed || (length - fixed) % quant_exception_bytes<Element>() != 0) {
    *bad = 1;
    return;
  }
  if (group >= s.groups()) return;
  if (!quant_decode_group<Format, Element>(body, s, (length - fixed) / quant_exception_bytes<Element>(),
                                           group, x))
    *bad = 1;
}

}  // namespace tiercache::codec
