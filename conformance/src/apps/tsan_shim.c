/* LLVM's instrumentation calls these functions, which the runtime of older GNU compilers does not
 * provide. */
#include <stddef.h>

void *memcpy(void *to, const void *from, size_t n);
void *memmove(void *to, const void *from, size_t n);
void *memset(void *to, int value, size_t n);

void *__tsan_memcpy(void *to, const void *from, size_t n)
{
	return memcpy(to, from, n);
}

void *__tsan_memmove(void *to, const void *from, size_t n)
{
	return memmove(to, from, n);
}

void *__tsan_memset(void *to, int value, size_t n)
{
	return memset(to, value, n);
}
