#if defined(__x86_64__)
#include <cstring>

#include "codec_window_kernels.hpp"

#define TC_PATH window_avx2
#define TC_TARGET [[gnu::target("avx2,bmi,bmi2,popcnt")]]
#include "codec_window_scalar.hpp"

namespace tiercache::codec {

const WindowKernels kWindowAvx2 = {window_avx2::encode, window_avx2::decode};

}  // namespace tiercache::codec
#endif
