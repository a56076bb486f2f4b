// The device codecs' kernels: nothing but indices around codec_steps.hpp. Compiled at run time by the `cuda`
// extra, or by nvcc. Every launch is on the caller's stream and waits for nothing.
#include "codec_steps.hpp"

using namespace tiercache::codec;

#define TC_THREAD (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x)

extern "C" __global__ void write_head(u8* out, u32 head, u32 bytes) {
  if (TC_THREAD < bytes) out[TC_THREAD] = static_cast<u8>(head >> (8 * TC_THREAD));
}

extern "C" __global__ void scan_counts(u8* counts, u64 n, u64 fixed, u64 unit, u64* length) {
  __shared__ u64 partial[kScanThreads];
  const int t = static_cast<int>(threadIdx.x);
  scan_share(counts, n, t, partial);
  __syncthreads();
  if (t == 0) scan_partials(partial, fixed, unit, length);
  __syncthreads();
  scan_write(counts, n, t, partial);
}

extern "C" __global__ void window_encode_groups(const u16* x, u64 groups, u8* body) {
  if (TC_THREAD < groups) window_encode_group(x, body, WindowLayout{groups}, TC_THREAD);
}

extern "C" __global__ void window_count_escapes(u8* body, u64 groups) {
  const WindowLayout at{groups};
  if (TC_THREAD < at.supers()) window_count(body, at, TC_THREAD);
}

extern "C" __global__ void window_write_escapes(const u16* x, u64 n, u8* body, u64 room, const u64* length) {
  window_finish(x, n, body, room, length[0], TC_THREAD);
}

extern "C" __global__ void window_decode_groups(const u8* body, u64 room, const u64* length, u64 n, u16* x,
                                                u32* bad) {
  if (length[0] > room) *bad = 1;
  else window_decode_step(body, length[0], n, x, TC_THREAD, bad);
}

extern "C" __global__ void quant_count_exceptions(const u8* body, u32 scale_bytes, u64 groups, u8* counts) {
  if (TC_THREAD * kSuper < groups) quant_count(body, static_cast<int>(scale_bytes), groups, TC_THREAD, counts);
}

#define TC_SHAPE u64 outer, u64 tokens, u64 channels, u32 axis
#define TC_SHAPED QuantShape{outer, tokens, channels, static_cast<Axis>(axis)}

#define TC_QUANT(name, Format, Element)                                                                    \
  extern "C" __global__ void name##_encode_groups(const Element::Word* x, TC_SHAPE, u64 seed, u8* body) {  \
    const QuantShape s = TC_SHAPED;                                                                        \
    if (TC_THREAD < s.groups()) quant_encode_group<Format, Element>(x, s, TC_THREAD, seed, body);          \
  }                                                                                                        \
  extern "C" __global__ void name##_write_exceptions(const Element::Word* x, TC_SHAPE, u8* body, u64 room, \
                                                     const u64* length, const u8* counts) {                \
    quant_finish<Format, Element>(x, TC_SHAPED, body, room, length[0], counts, TC_THREAD);                 \
  }                                                                                                        \
  extern "C" __global__ void name##_decode_groups(const u8* body, u64 room, const u64* length, TC_SHAPE,   \
                                                  Element::Word* x, u32* bad) {                            \
    if (length[0] > room) *bad = 1;                                                                        \
    else quant_decode_step<Format, Element>(body, length[0], TC_SHAPED, x, TC_THREAD, bad);                \
  }

TC_QUANT(e4m3_bf16, E4m3, Bf16)
TC_QUANT(e4m3_half, E4m3, Half)
TC_QUANT(e4m3_single, E4m3, Single)
TC_QUANT(int8_bf16, Int8, Bf16)
TC_QUANT(int8_half, Int8, Half)
TC_QUANT(int8_single, Int8, Single)
TC_QUANT(int4_bf16, Int4, Bf16)
TC_QUANT(int4_half, Int4, Half)
TC_QUANT(int4_single, Int4, Single)
