/* Generates data that depend only on a seed and an offset, so that the receiver can verify them. */
#include <string.h>

#include "soak.h"

static uint64_t word(uint64_t seed, uint64_t at)
{
	uint64_t x = seed + at * 0x9e3779b97f4a7c15u;

	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
	return x ^ (x >> 31);
}

/* `offset` is a multiple of 8. */
void fill(void *to, uint32_t length, uint64_t seed, uint64_t offset)
{
	char *at = to;
	uint64_t i = offset / 8;

	for (; length >= 8; length -= 8, at += 8) {
		uint64_t w = word(seed, i++);
		memcpy(at, &w, 8);
	}
	if (length) {
		uint64_t w = word(seed, i);
		memcpy(at, &w, length);
	}
}

void verify(const void *from, uint32_t length, uint64_t seed, uint64_t offset, const struct pair *p,
	    const char *what)
{
	static char wanted[SLOT];
	uint32_t i = 0;

	fill(wanted, length, seed, offset);
	if (memcmp(from, wanted, length) == 0)
		return;
	while (((const char *)from)[i] == wanted[i])
		i++;
	wrong("connection %d: %s: octet %u of %u is %02x instead of %02x", p->index, what, i,
	      length,
	      ((const unsigned char *)from)[i], (unsigned char)wanted[i]);
}
