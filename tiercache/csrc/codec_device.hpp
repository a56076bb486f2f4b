// What the arithmetic that runs on host and device needs, without any library: the run-time compiler of CUDA
// has no standard headers. Each function is one thread's work; codec_kernels.cuh only gives out the indices.
// Floating point is never contracted to fused operations, so that both sides round alike.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define TC_HD __host__ __device__ __forceinline__
#else
#define TC_HD [[gnu::always_inline]] inline
#endif

namespace tiercache::codec {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;

TC_HD int popcount(u64 bits) {
#if defined(__CUDA_ARCH__)
  return __popcll(bits);
#else
  return __builtin_popcountll(bits);
#endif
}

TC_HD u32 float_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return __builtin_bit_cast(u32, value);
#endif
}

TC_HD float bits_float(u32 bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

// Little-endian access a byte at a time: payloads promise no alignment.
TC_HD u32 read_u32(const u8* from) {
  return static_cast<u32>(from[0]) | static_cast<u32>(from[1]) << 8 | static_cast<u32>(from[2]) << 16 |
         static_cast<u32>(from[3]) << 24;
}

TC_HD void write_u16(u8* to, u32 value) {
  to[0] = static_cast<u8>(value);
  to[1] = static_cast<u8>(value >> 8);
}

TC_HD void write_u32(u8* to, u32 value) {
  write_u16(to, value);
  write_u16(to + 2, value >> 16);
}

TC_HD u64 read_u64(const u8* from) {
  return static_cast<u64>(read_u32(from)) | static_cast<u64>(read_u32(from + 4)) << 32;
}

TC_HD void write_u64(u8* to, u64 value) {
  write_u32(to, static_cast<u32>(value));
  write_u32(to + 4, static_cast<u32>(value >> 32));
}

}  // namespace tiercache::codec
