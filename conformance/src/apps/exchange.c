/* An MPI program that checks its results: a ring, collective operations, and long messages in
 * flight in all directions. A rank aborts if a value differs from the expected value. Rank 0 prints
 * a line for each part that all ranks have completed. */

#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static int rank, ranks;

static void done(const char *part)
{
	MPI_Barrier(MPI_COMM_WORLD);
	if (rank == 0) {
		printf("%s: correct on %d ranks\n", part, ranks);
		fflush(stdout);
	}
}

static void wrong(const char *part, long at, long have, long want)
{
	fprintf(stderr, "rank %d: %s: element %ld is %ld instead of %ld\n", rank, part, at, have,
		want);
	MPI_Abort(MPI_COMM_WORLD, 1);
}

static uint32_t *words(size_t n)
{
	uint32_t *p = malloc(n * sizeof *p);

	if (!p) {
		fprintf(stderr, "no memory\n");
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
	return p;
}

/* Returns the expected word `at` of message `message` from rank `from`. */
static uint32_t pattern(int from, int message, size_t at)
{
	uint32_t x = (uint32_t)at * 2654435761u + (uint32_t)from * 40503u + (uint32_t)message * 97u;

	return x ^ (x >> 15);
}

/* Passes a token around the ring. Each rank adds its number to the token. */
static void ring(int rounds)
{
	int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
	long token = 0;

	for (int i = 0; i < rounds; i++) {
		if (rank == 0) {
			MPI_Send(&token, 1, MPI_LONG, next, 1, MPI_COMM_WORLD);
			MPI_Recv(&token, 1, MPI_LONG, previous, 1, MPI_COMM_WORLD,
				 MPI_STATUS_IGNORE);
		} else {
			MPI_Recv(&token, 1, MPI_LONG, previous, 1, MPI_COMM_WORLD,
				 MPI_STATUS_IGNORE);
			token += rank;
			MPI_Send(&token, 1, MPI_LONG, next, 1, MPI_COMM_WORLD);
		}
	}
	if (rank == 0) {
		long want = (long)rounds * ranks * (ranks - 1) / 2;

		if (token != want)
			wrong("ring", 0, token, want);
	}
	done("ring");
}

/* Sums vectors of 1 to 2^16 doubles over all ranks. */
static void allreduce(void)
{
	for (size_t n = 1; n <= 1 << 17; n *= 16) {
		double *mine = malloc(n * sizeof *mine), *sum = malloc(n * sizeof *sum);

		if (!mine || !sum)
			MPI_Abort(MPI_COMM_WORLD, 1);
		for (size_t i = 0; i < n; i++) {
			mine[i] = (double)(rank + 1) * (double)(i % 1000);
			sum[i] = -1;
		}
		MPI_Allreduce(mine, sum, (int)n, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
		for (size_t i = 0; i < n; i++) {
			double want = (double)ranks * (ranks + 1) / 2 * (double)(i % 1000);

			if (sum[i] != want)
				wrong("allreduce", (long)i, (long)sum[i], (long)want);
		}
		free(mine);
		free(sum);
	}
	done("allreduce");
}

/* Each rank sends a different block to each rank. */
static void alltoall(size_t n)
{
	uint32_t *out = words(n * ranks), *in = words(n * ranks);

	for (int to = 0; to < ranks; to++)
		for (size_t i = 0; i < n; i++)
			out[(size_t)to * n + i] = pattern(rank, to, i);
	MPI_Alltoall(out, (int)n, MPI_UINT32_T, in, (int)n, MPI_UINT32_T, MPI_COMM_WORLD);
	for (int from = 0; from < ranks; from++)
		for (size_t i = 0; i < n; i++)
			if (in[(size_t)from * n + i] != pattern(from, rank, i))
				wrong("alltoall", (long)i, in[(size_t)from * n + i],
				      pattern(from, rank, i));
	free(out);
	free(in);
	done("alltoall");
}

/* Sends messages of increasing size to both neighbours. Several are in flight at the same time, and
 * the receives are posted in a different order. */
static void neighbours(size_t longest)
{
	enum { DEPTH = 4 };
	int peers[2] = { (rank + 1) % ranks, (rank + ranks - 1) % ranks };

	for (size_t n = 1; n <= longest; n *= 8) {
		uint32_t *out[2][DEPTH], *in[2][DEPTH];
		MPI_Request requests[4 * DEPTH];
		int r = 0;

		for (int p = 0; p < 2; p++)
			for (int d = DEPTH - 1; d >= 0; d--) {
				in[p][d] = words(n);
				MPI_Irecv(in[p][d], (int)n, MPI_UINT32_T, peers[p], 10 * d + !p,
					  MPI_COMM_WORLD, &requests[r++]);
			}
		for (int p = 0; p < 2; p++)
			for (int d = 0; d < DEPTH; d++) {
				out[p][d] = words(n);
				for (size_t i = 0; i < n; i++)
					out[p][d][i] = pattern(rank, 10 * d + p, i);
				MPI_Isend(out[p][d], (int)n, MPI_UINT32_T, peers[p], 10 * d + p,
					  MPI_COMM_WORLD, &requests[r++]);
			}
		MPI_Waitall(r, requests, MPI_STATUSES_IGNORE);
		for (int p = 0; p < 2; p++)
			for (int d = 0; d < DEPTH; d++) {
				for (size_t i = 0; i < n; i++) {
					uint32_t want = pattern(peers[p], 10 * d + !p, i);

					if (in[p][d][i] != want)
						wrong("neighbours", (long)i, in[p][d][i], want);
				}
				free(in[p][d]);
				free(out[p][d]);
			}
	}
	done("neighbours");
}

/* One-sided: each rank puts a block into the window of the next rank and gets one from the previous
 * rank. */
static void windows(size_t n)
{
	int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
	uint32_t *mine = words(2 * n), *got = words(n), *put = words(n);
	MPI_Win window;

	for (size_t i = 0; i < n; i++) {
		mine[i] = pattern(rank, 7, i);
		mine[n + i] = 0;
		put[i] = pattern(rank, 8, i);
	}
	MPI_Win_create(mine, (MPI_Aint)(2 * n * sizeof *mine), sizeof *mine, MPI_INFO_NULL,
		       MPI_COMM_WORLD, &window);
	MPI_Win_fence(0, window);
	MPI_Put(put, (int)n, MPI_UINT32_T, next, (MPI_Aint)n, (int)n, MPI_UINT32_T, window);
	MPI_Get(got, (int)n, MPI_UINT32_T, previous, 0, (int)n, MPI_UINT32_T, window);
	MPI_Win_fence(0, window);
	for (size_t i = 0; i < n; i++) {
		if (got[i] != pattern(previous, 7, i))
			wrong("get", (long)i, got[i], pattern(previous, 7, i));
		if (mine[n + i] != pattern(previous, 8, i))
			wrong("put", (long)i, mine[n + i], pattern(previous, 8, i));
	}
	MPI_Win_free(&window);
	free(mine);
	free(got);
	free(put);
	done("windows");
}

/* Returns half the round-trip time of one octet between neighbours, in us: the mean of `rounds`.
 * All pairs of neighbours run concurrently. */
static double half_round_trip(int rounds)
{
	char octet = 0;
	int peer = rank ^ 1;
	double begin = MPI_Wtime();

	if (peer >= ranks)
		return 0;
	for (int i = 0; i < rounds; i++) {
		if (rank < peer)
			MPI_Send(&octet, 1, MPI_CHAR, peer, 4, MPI_COMM_WORLD);
		MPI_Recv(&octet, 1, MPI_CHAR, peer, 4, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		if (rank > peer)
			MPI_Send(&octet, 1, MPI_CHAR, peer, 4, MPI_COMM_WORLD);
	}
	return (MPI_Wtime() - begin) * 5e5 / rounds;
}

/* Returns the time of a sum over all ranks, in us: the mean of `rounds`. */
static double sum_of_all(int rounds)
{
	uint32_t mine = (uint32_t)rank, sum;
	double begin = MPI_Wtime();

	for (int i = 0; i < rounds; i++)
		MPI_Allreduce(&mine, &sum, 1, MPI_UINT32_T, MPI_SUM, MPI_COMM_WORLD);
	return (MPI_Wtime() - begin) * 1e6 / rounds;
}

/* Prints both times, as means of all ranks. */
static void times(int rounds)
{
	double (*const parts[])(int) = { half_round_trip, sum_of_all };
	double mean[2];

	for (int i = 0; i < 2; i++) {
		double mine;

		parts[i](rounds / 10);
		MPI_Barrier(MPI_COMM_WORLD);
		mine = parts[i](rounds);
		MPI_Reduce(&mine, &mean[i], 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
	}
	if (rank == 0)
		printf("%d ranks: half a round trip %.1f us, allreduce %.1f us\n", ranks,
		       mean[0] / ranks, mean[1] / ranks);
}

/* Arguments: the length of the longest message in words, and optionally the number of rounds for
 * the time measurements. */
int main(int argc, char **argv)
{
	size_t longest = argc > 1 ? strtoul(argv[1], NULL, 10) : 1 << 18;
	int rounds = argc > 2 ? atoi(argv[2]) : 0;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	ring(100);
	allreduce();
	alltoall(1 << 14);
	neighbours(longest);
	windows(1 << 16);
	if (rounds > 0)
		times(rounds);
	MPI_Finalize();
	return 0;
}
