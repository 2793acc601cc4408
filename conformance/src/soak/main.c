/* The server or client of the soak test: `worker server|client ADDRESS PORT SEED`.
 *
 * Reads commands from standard input, one per line: `churn N` closes N connections gracefully;
 * `rest` stops new connections and operations, and closes all connections. Writes events to
 * standard output, one per line, with a `stat` line twice a second. */
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "soak.h"

struct pair pairs[PLACES];
struct totals totals;
struct ibv_pd *pd;
struct ibv_srq *srq;
struct ibv_cq *queues[2];
struct ibv_comp_channel *completions;

int channel_fd(void);
int async_fd(void);

static uint64_t random_state;
static int resting;

uint64_t now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

uint64_t number(void)
{
	uint64_t x = random_state += 0x9e3779b97f4a7c15u;

	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
	return x ^ (x >> 31);
}

static void print(const char *format, va_list list)
{
	vprintf(format, list);
	putchar('\n');
	if (fflush(stdout))
		_exit(4); /* the supervisor no longer reads */
}

void say(const char *format, ...)
{
	va_list list;

	va_start(list, format);
	print(format, list);
	va_end(list);
}

void wrong(const char *format, ...)
{
	va_list list;

	fputs("WRONG ", stdout);
	va_start(list, format);
	print(format, list);
	va_end(list);
	_exit(3);
}

static void report(void)
{
	static const char *const names[KINDS] = {
		"send",		"write", "read_back", "write_imm",    "read",	  "fetch_add",
		"compare_swap", "bind",	 "local_inv", "write_window", "send_inv",
	};
	struct mallinfo2 memory = mallinfo2();
	char text[1024];
	int at = 0;

	for (int i = 0; i < KINDS; i++)
		at += snprintf(text + at, sizeof(text) - (size_t)at, " %s=%lu", names[i],
			       totals.done[i]);
	say("stat live=%d draining=%d others=%d made=%lu closed=%lu lost=%lu failed=%lu "
	    "flushed=%lu other_errors=%lu messages=%lu announced=%lu invalidated=%lu heap=%zu%s",
	    count(LIVE), count(DRAINING), count(RESOLVING) + count(CONNECTING), totals.made,
	    totals.closed, totals.lost, totals.attempts_failed, totals.flushed,
	    totals.other_errors, totals.messages, totals.announced, totals.invalidated,
	    memory.uordblks, text);
}

static void commands(void)
{
	static char line[256];
	static size_t have;
	ssize_t n = read(0, line + have, sizeof(line) - 1 - have);
	char *end;

	if (n == 0)
		exit(0); /* the supervisor is gone */
	if (n < 0)
		return;
	have += (size_t)n;
	line[have] = 0;
	while ((end = strchr(line, '\n'))) {
		*end = 0;
		if (strncmp(line, "churn ", 6) == 0)
			churn(atoi(line + 6));
		else if (strcmp(line, "rest") == 0)
			resting = 1;
		have -= (size_t)(end + 1 - line);
		memmove(line, end + 1, have + 1);
	}
}

/* Sleeps until something happens, for 50 ms at most. */
static void wait_for_work(void)
{
	struct pollfd fds[4] = { { 0, POLLIN, 0 }, { channel_fd(), POLLIN, 0 },
				 { async_fd(), POLLIN, 0 }, { -1, POLLIN, 0 } };
	struct ibv_cq *cq;
	void *own;

	if (completions) {
		fds[3].fd = completions->fd;
		for (int q = 0; q < 2; q++)
			ibv_req_notify_cq(queues[q], 0);
		if (poll_completions())
			return;
	}
	poll(fds, 4, 50);
	while (completions && ibv_get_cq_event(completions, &cq, &own) == 0)
		ibv_ack_cq_events(cq, 1);
}

/* Destroys the shared objects. All connections must have been torn down. */
static void close_all(void)
{
	if (!srq)
		return;
	if (ibv_destroy_srq(srq) || ibv_destroy_cq(queues[0]) || ibv_destroy_cq(queues[1]) ||
	    ibv_destroy_comp_channel(completions))
		wrong("an object cannot be destroyed");
}

int main(int argc, char **argv)
{
	int server = argc == 5 && strcmp(argv[1], "server") == 0;
	uint64_t next_report = 0;

	if (argc != 5)
		return 2;
	random_state = strtoull(argv[4], NULL, 0);
	/* Allocate the library's large buffers with mmap, because pools keep as many of them as were ever
	 * needed. The heap then contains memory of connections only, so that a leak of a few bytes per
	 * connection is detected. */
	mallopt(M_MMAP_THRESHOLD, 64 << 10);
	fcntl(0, F_SETFL, O_NONBLOCK);
	if (server)
		listen_at(argv[2], atoi(argv[3]));
	say("ready");
	for (;;) {
		int busy = 0;

		if (!server && !resting)
			keep_connected(argv[2], atoi(argv[3]));
		busy += connection_events();
		asynchronous_events();
		busy += poll_completions();
		handle_failures();
		commands();
		for (int i = 0; i < PLACES; i++)
			if (pairs[i].state == LIVE)
				issue(&pairs[i]);
		advance_connections();
		if (resting && !server)
			churn(PAIRS);
		if (resting && count(NONE) == PLACES)
			break;
		if (now_ms() >= next_report) {
			report();
			next_report = now_ms() + 500;
		}
		if (!busy)
			wait_for_work();
	}
	report();
	close_all();
	say("end");
	return 0;
}
