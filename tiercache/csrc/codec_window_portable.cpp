#include <cstring>

#include "codec_window_kernels.hpp"

#define TC_PATH window_portable
#define TC_TARGET
#include "codec_window_scalar.hpp"

namespace tiercache::codec {

const WindowKernels kWindowPortable = {window_portable::encode, window_portable::decode};

}  // namespace tiercache::codec
