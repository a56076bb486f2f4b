#if defined(__x86_64__)
#include <cstring>

#include "codec_exponent_kernels.hpp"

// The same loops: with AVX2 the compiler widens them, with BMI2 the bit streams need no flags.
#define TC_PATH exponent_avx2
#define TC_TARGET [[gnu::target("avx2,bmi,bmi2,lzcnt")]]
#include "codec_exponent_scalar.hpp"

namespace tiercache::codec {

const ExponentKernels kExponentAvx2 = {exponent_avx2::split, exponent_avx2::row_sums,
                                       exponent_avx2::channel_sums, exponent_avx2::encode,
                                       exponent_avx2::decode};

}  // namespace tiercache::codec
#endif
