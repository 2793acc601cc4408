/* Resource usage of a process: allocations, descriptors and mappings. For leak checks. */
#ifndef USAGE_H
#define USAGE_H

#include <dirent.h>
#include <stdatomic.h>
#include <unistd.h>

#include "check.h"

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
	*__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static atomic_long living;

static inline void *counted(void *p)
{
	if (p)
		living++;
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
		living--;
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
	now.allocations = living;
	return now;
}

/* Runs `rounds` rounds of `way`. Returns 1 if they leave nothing. The library's threads end
 * connections in the background, and a request for a destroyed queue pair waits for 30 seconds, so
 * this waits for longer. */
static inline int all_ends(void (*way)(int), int arg, int rounds, struct usage *more)
{
	struct usage before = usage_now(), now;
	int i;

	for (i = 0; i < rounds; i++)
		way(arg);
	for (i = 0; i < 3500; i++) {
		now = usage_now();
		more->allocations = now.allocations - before.allocations;
		more->descriptors = now.descriptors - before.descriptors;
		more->mappings = now.mappings - before.mappings;
		if (more->allocations < rounds && more->descriptors <= 0 && more->mappings < rounds)
			return 1;
		usleep(10000);
	}
	return 0;
}

/* Checks that `way` leaks nothing. Starting threads, growing tables, and entries that are removed
 * when the next one is added are not leaks: they do not grow with the rounds, so a second attempt
 * runs ten times as many. */
static inline void leaves_nothing(const char *name, void (*way)(int), int arg, int rounds)
{
	struct usage more;

	way(arg);
	checks++;
	if (all_ends(way, arg, rounds, &more) || all_ends(way, arg, 10 * rounds, &more))
		return;
	fprintf(stderr, "%s, %d: after %d rounds %+ld allocations, %+ld descriptors, %+ld mappings\n",
		name, arg, 10 * rounds,
		more.allocations, more.descriptors, more.mappings);
	failures++;
}

#endif
