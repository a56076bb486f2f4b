// What the arithmetic that runs on host and device needs, without any library: the run-time compiler of CUDA
// has no standard headers. Each function is one thread's work; codec_kernels.cuh only gives out the indices.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define TC_HD __host__ __device__ inline
#else
#define TC_HD inline
#endif

namespace tiercache::codec {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

TC_HD int popcount(u64 bits) {
#if defined(__CUDA_ARCH__)
  return __popcll(bits);
#else
  return __builtin_popcountll(bits);
#endif
}

// Unaligned little-endian access, a byte at a time: payloads promise no alignment.
TC_HD u32 read_u32(const u8* from) {
  return static_cast<u32>(from[0]) | static_cast<u32>(from[1]) << 8 | static_cast<u32>(from[2]) << 16 |
         static_cast<u32>(from[3]) << 24;
}

TC_HD void write_u32(u8* to, u32 value) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<u8>(value >> (8 * i));
}

TC_HD u64 read_u64(const u8* from) {
  return static_cast<u64>(read_u32(from)) | static_cast<u64>(read_u32(from + 4)) << 32;
}

TC_HD void write_u64(u8* to, u64 value) {
  write_u32(to, static_cast<u32>(value));
  write_u32(to + 4, static_cast<u32>(value >> 32));
}

}  // namespace tiercache::codec
