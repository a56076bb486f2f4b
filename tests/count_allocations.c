/* Preloaded: live and peak bytes of all allocations of COUNTED bytes and more, whoever makes them. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

enum { COUNTED = 2 << 20 };

static atomic_long live_bytes, peak_bytes;

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);
extern void __libc_free(void*);

static void* note(void* made) {
  const long size = made ? (long)malloc_usable_size(made) : 0;
  if (size < COUNTED) return made;
  const long now = atomic_fetch_add(&live_bytes, size) + size;
  long peak = atomic_load(&peak_bytes);
  while (now > peak && !atomic_compare_exchange_weak(&peak_bytes, &peak, now)) {
  }
  return made;
}

static void forget(void* made) {
  const long size = made ? (long)malloc_usable_size(made) : 0;
  if (size >= COUNTED) atomic_fetch_sub(&live_bytes, size);
}

void* malloc(size_t size) { return note(__libc_malloc(size)); }
void* calloc(size_t count, size_t size) { return note(__libc_calloc(count, size)); }
void* memalign(size_t align, size_t size) { return note(__libc_memalign(align, size)); }
void* aligned_alloc(size_t align, size_t size) { return note(__libc_memalign(align, size)); }

int posix_memalign(void** out, size_t align, size_t size) {
  void* made = note(__libc_memalign(align, size));
  if (!made) return ENOMEM;
  *out = made;
  return 0;
}

void* realloc(void* old, size_t size) {
  forget(old);
  return note(__libc_realloc(old, size));
}

void free(void* made) {
  forget(made);
  __libc_free(made);
}

long live_allocations(void) { return atomic_load(&live_bytes); }
long peak_allocations(void) { return atomic_load(&peak_bytes); }
void begin_peak(void) { atomic_store(&peak_bytes, atomic_load(&live_bytes)); }
