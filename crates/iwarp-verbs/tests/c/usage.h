/* Leak checks: the number of allocations, descriptors and mappings of the process. */
#ifndef USAGE_H
#define USAGE_H

#include <dirent.h>
#include <stdatomic.h>
#include <unistd.h>

#include "check.h"

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
	*__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static atomic_long allocated;

static inline void *counted(void *p)
{
	if (p)
		allocated++;
	return p;
}

void *malloc(size_t size) { return counted(__libc_malloc(size)); }
void *calloc(size_t n, size_t size) { return counted(__libc_calloc(n, size)); }
void *memalign(size_t align, size_t size) { return counted(__libc_memalign(align, size)); }
void *aligned_alloc(size_t align, size_t size) { return memalign(align, size); }

void *realloc(void *p, size_t size)
{
	return p ? __libc_realloc(p, size) : counted(__libc_realloc(p, size));
}

int posix_memalign(void **to, size_t align, size_t size)
{
	*to = memalign(align, size);
	return *to ? 0 : ENOMEM;
}

void free(void *p)
{
	if (p)
		allocated--;
	__libc_free(p);
}

struct usage {
	long allocations, descriptors, mappings;
};

static inline struct usage usage_now(void)
{
	struct usage now = { 0 };
	FILE *maps = fopen("/proc/self/maps", "r");
	DIR *dir = opendir("/proc/self/fd");
	int c;

	NEED(maps && dir);
	while (readdir(dir))
		now.descriptors++;
	closedir(dir);
	while ((c = getc(maps)) != EOF)
		now.mappings += c == '\n';
	fclose(maps);
	now.allocations = allocated;
	return now;
}

/* Runs `scenario` several times. Returns 1 if the usage then returns to its previous value. The
 * library's threads end connections in the background, and a request for a destroyed queue pair
 * waits for 30 seconds, so this waits up to 35 seconds. */
static inline int returns_to_baseline(void (*scenario)(int), int arg, int rounds,
	struct usage *growth)
{
	struct usage before = usage_now(), now;
	int i;

	for (i = 0; i < rounds; i++)
		scenario(arg);
	for (i = 0; i < 3500; i++) {
		now = usage_now();
		growth->allocations = now.allocations - before.allocations;
		growth->descriptors = now.descriptors - before.descriptors;
		growth->mappings = now.mappings - before.mappings;
		if (growth->allocations < rounds && growth->descriptors <= 0 && growth->mappings < rounds)
			return 1;
		usleep(10000);
	}
	return 0;
}

/* Checks that `scenario` leaks nothing. Started threads, larger tables, and entries that are
 * removed when the next entry is added are not leaks: their number does not depend on the rounds.
 * So a second attempt runs ten times as many rounds. */
static inline void check_no_leaks(const char *name, void (*scenario)(int), int arg, int rounds)
{
	struct usage growth;

	scenario(arg);
	checks++;
	if (returns_to_baseline(scenario, arg, rounds, &growth) ||
		returns_to_baseline(scenario, arg, 10 * rounds, &growth))
		return;
	fprintf(stderr, "%s, %d: after %d rounds %+ld allocations, %+ld descriptors, %+ld mappings\n",
		name, arg, 10 * rounds,
		growth.allocations, growth.descriptors, growth.mappings);
	failures++;
}

#endif
