/* Tests OpenSHMEM between all processes: put, get and atomic operations, and checks the contents.
 */
#include <shmem.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t expected(int from, int to, size_t at)
{
	return ((uint64_t)from * 1000003 + to) * 0x9e3779b97f4a7c15u + at;
}

static void check(int holds, const char *what)
{
	if (holds)
		return;
	fprintf(stderr, "%s: wrong on process %d\n", what, shmem_my_pe());
	shmem_global_exit(1);
}

static void report(const char *what)
{
	shmem_barrier_all();
	if (shmem_my_pe() == 0)
		printf("%s: correct on %d processes\n", what, shmem_n_pes());
	fflush(stdout);
}

int main(int argc, char **argv)
{
	if (argc != 2)
		return 2;
	size_t words = strtoull(argv[1], NULL, 10);
	shmem_init();
	int me = shmem_my_pe(), all = shmem_n_pes();
	uint64_t *target = shmem_calloc(words * all, sizeof *target);
	uint64_t *source = shmem_calloc(words * all, sizeof *source);
	unsigned long *counter = shmem_calloc(2, sizeof *counter);
	uint64_t *copy = malloc(words * sizeof *copy);
	if (!target || !source || !counter || !copy)
		return 1;
	for (int to = 0; to < all; to++)
		for (size_t at = 0; at < words; at++)
			source[to * words + at] = expected(me, to, at);
	shmem_barrier_all();

	for (int to = 0; to < all; to++)
		shmem_uint64_put(target + me * words, source + to * words, words, to);
	shmem_barrier_all();
	for (int from = 0; from < all; from++)
		for (size_t at = 0; at < words; at++)
			check(target[from * words + at] == expected(from, me, at), "put");
	report("put");

	for (int from = 0; from < all; from++) {
		shmem_uint64_get(copy, source + me * words, words, from);
		for (size_t at = 0; at < words; at++)
			check(copy[at] == expected(from, me, at), "get");
	}
	report("get");

	enum { ROUNDS = 100 };
	for (int round = 0; round < ROUNDS; round++)
		for (int to = 0; to < all; to++)
			shmem_ulong_atomic_fetch_add(counter, me + 1, to);
	shmem_barrier_all();
	check(*counter == (unsigned long)ROUNDS * all * (all + 1) / 2, "atomics");
	if (me)
		shmem_ulong_atomic_compare_swap(counter + 1, 0, me, 0);
	shmem_barrier_all();
	check(me || all == 1 || (counter[1] > 0 && counter[1] < (unsigned long)all), "swap");
	report("atomics");
	/* Open MPI 4.1.4 crashes in shmem_finalize, also over TCP. */
	shmem_global_exit(0);
	return 0;
}
