/* Checks for the C programs. All checks are counted; a failed check prints its source line. */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Updated by several threads. */
static _Atomic int checks, failures;

/* Checks that a condition is true. */
#define CHECK(condition) check_((condition) != 0, __FILE__, __LINE__, #condition)

/* Checks the result of a call that returns 0 or an errno. */
#define CODE(want, call) code_((call), (want), __FILE__, __LINE__, #call)

/* Checks that a call returns -1 and sets errno to `want`. */
#define MINUS_ONE(want, call) (errno = 0, minus_one_((call), (want), __FILE__, __LINE__, #call))

/* Checks that a call returns NULL and sets errno to `want`. */
#define IS_NULL(want, call) (errno = 0, is_null_((call), (want), __FILE__, __LINE__, #call))

/* Exits if the condition is false, because later checks depend on it. */
#define NEED(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, strerror(errno)); \
			exit(2); \
		} \
	} while (0)

static inline void failed_(const char *file, int line, const char *what, const char *got)
{
	failures++;
	fprintf(stderr, "%s:%d: %s: %s\n", file, line, what, got);
}

static inline void check_(int ok, const char *file, int line, const char *what)
{
	checks++;
	if (!ok)
		failed_(file, line, what, "is false");
}

static inline void code_(int got, int want, const char *file, int line, const char *what)
{
	checks++;
	if (got != want) {
		char text[80];
		snprintf(text, sizeof(text), "%d instead of %d", got, want);
		failed_(file, line, what, text);
	}
}

static inline void minus_one_(int got, int want, const char *file, int line, const char *what)
{
	int now = errno;

	checks++;
	if (got != -1 || now != want) {
		char text[80];
		snprintf(text, sizeof(text), "%d and errno %d instead of -1 and %d", got, now, want);
		failed_(file, line, what, text);
	}
}

static inline void is_null_(const void *got, int want, const char *file, int line, const char *what)
{
	int now = errno;

	checks++;
	if (got || now != want) {
		char text[80];
		snprintf(text, sizeof(text), "%p and errno %d instead of NULL and %d", got, now, want);
		failed_(file, line, what, text);
	}
}

/* Prints the counts and returns the exit code of main. */
static inline int result(void)
{
	printf("%d checks, %d failed\n", checks, failures);
	return failures != 0;
}

#endif
