/* A program that uses ordinary sockets, run with the preload library. It checks that the socket
 * calls behave as their manual pages describe. Arguments: the loopback port of a TCP echo server,
 * and "nonblocking" for the fallback of a nonblocking socket; or "workers" for the tests of
 * RDMAV_FORK_SAFE. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static int checks, failures;

#define CHECK(condition) check_(condition, __LINE__, #condition)

/* Exits if the condition is false, because later checks depend on it. */
#define NEED(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "%d: %s: %s\n", __LINE__, #condition, strerror(errno)); \
			exit(2); \
		} \
	} while (0)

static void check_(int ok, int line, const char *what)
{
	checks++;
	if (!ok) {
		failures++;
		fprintf(stderr, "%d: %s is false (errno %d)\n", line, what, errno);
	}
}

static int is_rsocket(int fd)
{
	int value;
	socklen_t length = sizeof(value);

	return getsockopt(fd, 0x10000, 0, &value, &length) == 0;
}

static struct sockaddr_in loopback(int port)
{
	return (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons(port),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
}

struct pair {
	int a, b;
};

static int listener, port;

static void listen_on_free_port(void)
{
	struct sockaddr_in addr = loopback(0);
	socklen_t length = sizeof(addr);

	NEED((listener = socket(AF_INET, SOCK_STREAM, 0)) >= 0 &&
		bind(listener, (struct sockaddr *)&addr, sizeof(addr)) == 0);
	NEED(listen(listener, 8) == 0 && getsockname(listener, (struct sockaddr *)&addr, &length) == 0);
	port = ntohs(addr.sin_port);
}

static struct pair connect_pair(int flags)
{
	struct sockaddr_in addr = loopback(port);
	struct pair p = { .a = socket(AF_INET, SOCK_STREAM, 0) };

	NEED(p.a >= 0 && connect(p.a, (struct sockaddr *)&addr, sizeof(addr)) == 0);
	NEED((p.b = accept4(listener, NULL, NULL, flags)) >= 0);
	CHECK(is_rsocket(p.a) && is_rsocket(p.b));
	return p;
}

static void exchange(int a, int b)
{
	char got = 0;

	CHECK(write(a, "x", 1) == 1 && read(b, &got, 1) == 1 && got == 'x');
	CHECK(send(b, "y", 1, 0) == 1 && recv(a, &got, 1, 0) == 1 && got == 'y');
}

/* Returns 1 if the peer has closed the stream gracefully. */
static int has_ended(int fd)
{
	char octet;

	return read(fd, &octet, 1) == 0;
}

/* A duplicated descriptor refers to the same connection, which ends when the last duplicate is
 * closed. */
static void test_duplicates(void)
{
	int kind;

	for (kind = 0; kind < 6; kind++) {
		struct pair p = connect_pair(0), replaced = { -1, -1 };
		int copy = -1, flags = kind == 3 || kind == 5 ? FD_CLOEXEC : 0;

		switch (kind) {
		case 0:
			copy = dup(p.a);
			break;
		case 1:
			copy = dup2(p.a, open("/dev/null", O_RDONLY));
			break;
		case 2:
			replaced = connect_pair(0);
			copy = dup2(p.a, replaced.a);
			break;
		case 3:
			replaced = connect_pair(0);
			copy = dup3(p.a, replaced.a, O_CLOEXEC);
			break;
		case 4:
			copy = fcntl(p.a, F_DUPFD, 40);
			CHECK(copy >= 40);
			break;
		case 5:
			copy = fcntl(p.a, F_DUPFD_CLOEXEC, 40);
			break;
		}
		CHECK(copy >= 0 && is_rsocket(copy) && fcntl(copy, F_GETFD) == flags);
		/* dup2 and dup3 close the connection that they replace. */
		CHECK(replaced.b < 0 || has_ended(replaced.b));
		exchange(copy, p.b);
		CHECK(close(p.a) == 0 && !is_rsocket(p.a));
		exchange(copy, p.b);
		CHECK(dup2(copy, copy) == copy);
		exchange(copy, p.b);
		CHECK(close(copy) == 0 && has_ended(p.b));
		CHECK(close(p.b) == 0 && (replaced.b < 0 || close(replaced.b) == 0));
	}
}

enum { LENGTH = 3 << 20, FIRST = 1000 };

static unsigned char pattern(size_t position)
{
	return (unsigned char)(position * 2654435761u >> 13);
}

/* Receives what has arrived and checks it. */
static size_t drain(int fd, size_t position)
{
	static unsigned char piece[65536];
	ssize_t n;
	int wrong = 0, i;

	while ((n = recv(fd, piece, sizeof(piece), MSG_DONTWAIT)) > 0)
		for (i = 0; i < n; i++)
			wrong += piece[i] != pattern(position++);
	CHECK(!wrong);
	return position;
}

/* sendfile sends a file in order and completely, even if the socket accepts little at a time. It
 * reports its progress in the offset, or in the position of the file. */
static void test_sendfile(void)
{
	int by_offset;
	size_t i;

	for (by_offset = 0; by_offset < 2; by_offset++) {
		char name[] = "/tmp/iwarp-preloaded-XXXXXX";
		unsigned char *octets = malloc(LENGTH);
		struct pair p = connect_pair(0);
		int file = mkstemp(name);
		size_t done = FIRST, got = 0;
		off_t offset = FIRST;

		NEED(octets && file >= 0 && unlink(name) == 0);
		for (i = 0; i < LENGTH; i++)
			octets[i] = pattern(i);
		NEED(write(file, octets, LENGTH) == LENGTH && lseek(file, by_offset ? 0 : FIRST, SEEK_SET) >= 0);
		/* Send this first, so that the peer's buffer becomes full in the middle of a chunk. */
		NEED(write(p.a, octets, FIRST) == FIRST);
		NEED(fcntl(p.a, F_SETFL, O_NONBLOCK) == 0);
		while (got < LENGTH) {
			ssize_t n = sendfile(p.a, file, by_offset ? &offset : NULL, LENGTH - done);

			NEED(n >= 0 || errno == EAGAIN);
			done += n > 0 ? n : 0;
			CHECK(lseek(file, 0, SEEK_CUR) == (by_offset ? 0 : (off_t)done) &&
				offset == (by_offset ? (off_t)done : FIRST));
			got = drain(p.b, got);
			NEED(!failures);
		}
		CHECK(done == LENGTH && got == LENGTH);
		CHECK(close(p.a) == 0 && has_ended(p.b) && close(p.b) == 0 && close(file) == 0);
		free(octets);
	}
}

/* Calls select or pselect with all descriptors in all sets. */
static int call_select(int with_mask, const int *fds, int n, fd_set sets[3], int ms)
{
	struct timeval tv = { .tv_usec = ms * 1000 };
	struct timespec ts = { .tv_nsec = ms * 1000000L };
	int i, k;

	for (k = 0; k < 3; k++) {
		FD_ZERO(&sets[k]);
		for (i = 0; i < n; i++)
			FD_SET(fds[i], &sets[k]);
	}
	if (with_mask)
		return pselect(FD_SETSIZE, &sets[0], NULL, &sets[2], &ts, NULL);
	return select(FD_SETSIZE, &sets[0], NULL, &sets[2], &tv);
}

/* The end of a pipe is readable, a closed descriptor is an error, and pselect restores the signal
 * mask. */
static void test_closed_descriptors(struct pair *p, const int *pipes)
{
	int fds[3] = { p->a, p->b, pipes[0] };
	struct timespec ts = { 0 };
	sigset_t all, before, after;
	fd_set s[3];

	close(pipes[1]);
	CHECK(call_select(0, fds, 3, s, 500) == 1 && FD_ISSET(pipes[0], &s[0]));
	close(pipes[0]);
	CHECK(call_select(0, fds, 3, s, 10) == -1 && errno == EBADF);
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, NULL, &before);
	FD_ZERO(&s[0]);
	FD_SET(p->a, &s[0]);
	CHECK(pselect(p->a + 1, &s[0], NULL, NULL, &ts, &all) == 0);
	sigprocmask(SIG_SETMASK, NULL, &after);
	CHECK(sigismember(&before, SIGUSR1) == sigismember(&after, SIGUSR1));
	CHECK(close(p->a) == 0 && close(p->b) == 0);
}

/* select keeps only ready descriptors in its sets, and none after a timeout. The sets contain
 * rsockets and an ordinary descriptor. */
static void test_select(void)
{
	struct pair p = connect_pair(0);
	int pipes[2], mask, i;

	NEED(pipe(pipes) == 0);
	for (mask = 0; mask < 2; mask++) {
		int fds[3] = { p.a, p.b, pipes[0] };
		fd_set s[3];
		char octet;

		CHECK(call_select(mask, fds, 3, s, 10) == 0);
		for (i = 0; i < 3; i++)
			CHECK(!FD_ISSET(fds[i], &s[0]) && !FD_ISSET(fds[i], &s[2]));
		NEED(write(p.a, "x", 1) == 1);
		/* Wait until the byte arrives. */
		while (call_select(mask, fds, 3, s, 500) == 0)
			;
		CHECK(!FD_ISSET(p.a, &s[0]) && FD_ISSET(p.b, &s[0]) && !FD_ISSET(pipes[0], &s[0]) &&
			!FD_ISSET(p.b, &s[2]));
		NEED(read(p.b, &octet, 1) == 1 && write(pipes[1], "x", 1) == 1);
		CHECK(call_select(mask, fds, 3, s, 500) == 1 && FD_ISSET(pipes[0], &s[0]) &&
			!FD_ISSET(p.b, &s[0]));
		NEED(read(pipes[0], &octet, 1) == 1);
	}
	test_closed_descriptors(&p, pipes);
}

static void test_poll(void)
{
	struct pair p = connect_pair(0);
	struct pollfd fds[3] = { { p.a, POLLIN, -1 }, { -7, POLLIN, -1 }, { p.b, POLLIN | POLLOUT, -1 } };
	struct timespec ts = { .tv_nsec = 1000000 };
	char octet;

	CHECK(poll(fds, 3, 10) == 1 && fds[0].revents == 0 && fds[1].revents == 0 &&
		fds[2].revents == POLLOUT);
	CHECK(fds[0].fd == p.a && fds[1].fd == -7 && fds[2].fd == p.b);
	fds[0].revents = fds[1].revents = -1;
	CHECK(ppoll(fds, 2, &ts, NULL) == 0 && fds[0].revents == 0 && fds[1].revents == 0);
	NEED(write(p.b, "x", 1) == 1);
	CHECK(poll(fds, 2, 20000) == 1 && fds[0].revents == POLLIN && read(p.a, &octet, 1) == 1);
	CHECK(close(p.a) == 0 && close(p.b) == 0);
}

/* The flags of accept4 apply to the new descriptor only. */
static void test_flags(void)
{
	struct pair p = connect_pair(SOCK_NONBLOCK | SOCK_CLOEXEC);
	int on = 1, off = 0, readable = -1;
	char octet;

	CHECK(fcntl(p.b, F_GETFL) & O_NONBLOCK && fcntl(p.b, F_GETFD) == FD_CLOEXEC);
	CHECK(!(fcntl(listener, F_GETFL) & O_NONBLOCK) && fcntl(listener, F_GETFD) == 0);
	CHECK(!(fcntl(p.a, F_GETFL) & O_NONBLOCK) && fcntl(p.a, F_GETFD) == 0);
	CHECK(read(p.b, &octet, 1) == -1 && errno == EAGAIN);
	CHECK(ioctl(p.b, FIONREAD, &readable) == 0 && readable == 0);
	CHECK(ioctl(p.b, FIONBIO, &off) == 0 && !(fcntl(p.b, F_GETFL) & O_NONBLOCK));
	CHECK(ioctl(p.a, FIONBIO, &on) == 0 && fcntl(p.a, F_GETFL) & O_NONBLOCK &&
		!(fcntl(p.b, F_GETFL) & O_NONBLOCK));
	NEED(write(p.a, "abc", 3) == 3 && recv(p.b, &octet, 1, MSG_PEEK) == 1);
	while (ioctl(p.b, FIONREAD, &readable) == 0 && readable < 3)
		;
	CHECK(readable == 3);
	CHECK(accept4(listener, NULL, NULL, 1 << 30) == -1 && errno == EINVAL);
	CHECK(close(p.a) == 0 && close(p.b) == 0);
}

/* Waits for an event of a set. Returns 1 if there is one event, with these values. */
static int reports_event(int set, unsigned events, unsigned long long value)
{
	struct epoll_event got[4];
	int n = epoll_wait(set, got, 4, 2000);

	return n == 1 && got[0].events == events && got[0].data.u64 == value;
}

/* An epoll set with rsockets and pipes. The set is closed and created again. User data may have any
 * value, even the value that the library uses internally. */
static void test_epoll(void)
{
	struct pair p = connect_pair(0);
	struct epoll_event event = { .events = EPOLLIN, .data.u64 = ~0ULL }, got[4];
	struct timespec moment = { 0, 1000000 };
	int pipes[2], set, round;

	NEED(pipe(pipes) == 0);
	for (round = 0; round < 2; round++) {
		char octet;
		int n, i, seen = 0;

		NEED((set = epoll_create1(EPOLL_CLOEXEC)) >= 0);
		CHECK(epoll_ctl(set, EPOLL_CTL_MOD, p.b, &event) == -1 && errno == ENOENT);
		CHECK(epoll_ctl(set, EPOLL_CTL_ADD, p.b, &event) == 0);
		CHECK(epoll_ctl(set, EPOLL_CTL_ADD, p.b, &event) == -1 && errno == EEXIST);
		CHECK(epoll_wait(set, got, 4, 0) == 0 && epoll_wait(set, got, 4, 5) == 0);
		CHECK(epoll_pwait(set, got, 4, 5, NULL) == 0);
		CHECK(epoll_pwait2(set, got, 4, &moment, NULL) == 0);
		CHECK(epoll_wait(set, got, 0, 0) == -1 && errno == EINVAL);
		CHECK(write(p.a, "x", 1) == 1 && reports_event(set, EPOLLIN, ~0ULL));
		/* Changing the structure after the call must not change the registered value. */
		event.data.u64 = 7;
		CHECK(epoll_ctl(set, EPOLL_CTL_ADD, pipes[0], &event) == 0 && reports_event(set, EPOLLIN, ~0ULL));
		CHECK(write(pipes[1], "y", 1) == 1);
		for (n = 0; n < 2; n = epoll_wait(set, got, 4, 2000))
			;
		for (i = 0; i < n; i++)
			seen |= got[i].data.u64 == 7 ? 1 : got[i].data.u64 == ~0ULL ? 2 : 4;
		CHECK(n == 2 && seen == 3);
		/* If the program takes one event at a time, both descriptors are reported eventually. */
		for (seen = i = 0; i < 50 && seen != 3; i++)
			if (epoll_wait(set, got, 1, 100) == 1)
				seen |= got[0].data.u64 == 7 ? 1 : 2;
		CHECK(seen == 3);
		CHECK(read(pipes[0], &octet, 1) == 1 && reports_event(set, EPOLLIN, ~0ULL));
		CHECK(read(p.b, &octet, 1) == 1 && epoll_wait(set, got, 4, 0) == 0);
		event.events = EPOLLOUT | EPOLLONESHOT;
		event.data.u64 = 9;
		CHECK(epoll_ctl(set, EPOLL_CTL_MOD, p.b, &event) == 0 && reports_event(set, EPOLLOUT, 9));
		CHECK(epoll_wait(set, got, 4, 0) == 0);
		CHECK(epoll_ctl(set, EPOLL_CTL_DEL, p.b, NULL) == 0);
		CHECK(epoll_ctl(set, EPOLL_CTL_DEL, p.b, NULL) == -1 && errno == ENOENT);
		event.events = EPOLLIN;
		event.data.u64 = ~0ULL;
		CHECK(close(set) == 0);
	}
	/* A new set with the number of a closed one is empty. */
	NEED((set = epoll_create1(0)) >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, p.b, &event) == 0);
	NEED(close(set) == 0 && epoll_create1(0) == set && write(p.a, "x", 1) == 1);
	CHECK(epoll_wait(set, got, 4, 50) == 0 && close(set) == 0);
	CHECK(epoll_ctl(pipes[0], EPOLL_CTL_ADD, p.b, &event) == -1 && errno == EINVAL);
	CHECK(close(p.a) == 0 && close(p.b) == 0 && close(pipes[0]) == 0 && close(pipes[1]) == 0);
}

/* An rsocket's descriptor has the file type of a socket. As with TCP, sendto ignores the address on
 * a stream. */
static void test_socket_type(void)
{
	struct pair p = connect_pair(0);
	struct sockaddr_in addr = loopback(1);
	struct stat is;
	char octet = 0;

	CHECK(fstat(p.a, &is) == 0 && S_ISSOCK(is.st_mode));
	CHECK(fstat(0, &is) == 0 && !S_ISSOCK(is.st_mode));
	CHECK(sendto(p.a, "x", 1, 0, (struct sockaddr *)&addr, sizeof(addr)) == 1);
	CHECK(read(p.b, &octet, 1) == 1 && octet == 'x');
	CHECK(close(p.a) == 0 && close(p.b) == 0);
}

/* RS_SQ_SIZE, RS_RQ_SIZE and RS_INLINE set the options with the same names. */
static void test_size_variables(void)
{
	static const struct { const char *name, *text; int option, value; } all[] = {
		{ "RS_SQ_SIZE", "40", 0, 40 }, { "RS_RQ_SIZE", "50", 1, 50 }, { "RS_INLINE", "48", 2, 48 },
	};
	size_t i;
	int fd;

	for (i = 0; i < 3; i++)
		setenv(all[i].name, all[i].text, 1);
	NEED((fd = socket(AF_INET, SOCK_STREAM, 0)) >= 0);
	for (i = 0; i < 3; i++) {
		int value = 0;
		socklen_t length = sizeof(value);

		CHECK(getsockopt(fd, 0x10000, all[i].option, &value, &length) == 0 && value == all[i].value);
		unsetenv(all[i].name);
	}
	CHECK(close(fd) == 0);
}

/* If the peer is a TCP server, connect falls back to TCP, and keeps the descriptor and its
 * options. */
static void test_tcp_fallback(int echo)
{
	struct sockaddr_in addr = loopback(echo);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1, value = 0;
	socklen_t length = sizeof(value);
	char octet = 0;

	NEED(fd >= 0 && is_rsocket(fd) && setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) == 0);
	NEED(setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on)) == 0);
	NEED(connect(fd, (struct sockaddr *)&addr, sizeof(addr)) == 0);
	CHECK(getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &value, &length) == 0 && value);
	value = 0;
	CHECK(!is_rsocket(fd) && fcntl(fd, F_GETFD) == FD_CLOEXEC && !(fcntl(fd, F_GETFL) & O_NONBLOCK));
	CHECK(getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &value, &length) == 0 && value);
	CHECK(write(fd, "z", 1) == 1 && read(fd, &octet, 1) == 1 && octet == 'z');
	CHECK(close(fd) == 0);
}

/* A nonblocking socket stays nonblocking when it falls back immediately, here because an injected
 * fault lets a queue run out. */
static void test_nonblocking_fallback(int echo)
{
	struct sockaddr_in addr = loopback(echo);
	struct pollfd entry = { .fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), .events = POLLOUT };
	int error = -1;
	socklen_t length = sizeof(error);
	char octet = 0;

	NEED(entry.fd >= 0 && is_rsocket(entry.fd));
	CHECK(connect(entry.fd, (struct sockaddr *)&addr, sizeof(addr)) == -1 && errno == EINPROGRESS);
	CHECK(!is_rsocket(entry.fd) && fcntl(entry.fd, F_GETFL) & O_NONBLOCK);
	NEED(poll(&entry, 1, 5000) == 1);
	CHECK(getsockopt(entry.fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0);
	CHECK(read(entry.fd, &octet, 1) == -1 && errno == EAGAIN);
	entry.events = POLLIN;
	CHECK(write(entry.fd, "z", 1) == 1 && poll(&entry, 1, 5000) == 1);
	CHECK(read(entry.fd, &octet, 1) == 1 && octet == 'z');
	CHECK(close(entry.fd) == 0);
}

/* Waits, at most 20 s, until a descriptor can be written. */
enum wait_by { BY_POLL, BY_SELECT, BY_EPOLL, WAITS };

static int wait_writable(int fd, enum wait_by by)
{
	struct pollfd entry = { .fd = fd, .events = POLLOUT };
	struct timeval limit = { .tv_sec = 20 };
	struct epoll_event event = { .events = EPOLLOUT, .data.u64 = 77 }, got = { 0 };
	fd_set set;
	int n, epfd;

	switch (by) {
	case BY_POLL:
		return poll(&entry, 1, 20000) == 1 && entry.revents & POLLOUT;
	case BY_SELECT:
		FD_ZERO(&set);
		FD_SET(fd, &set);
		return select(fd + 1, NULL, &set, NULL, &limit) == 1 && FD_ISSET(fd, &set);
	default:
		NEED((epfd = epoll_create1(0)) >= 0 && epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &event) == 0);
		n = epoll_wait(epfd, &got, 1, 20000);
		/* The set keeps the descriptor and its user data. */
		CHECK(epoll_ctl(epfd, EPOLL_CTL_MOD, fd, &event) == 0);
		CHECK(close(epfd) == 0);
		return n == 1 && got.events & EPOLLOUT && got.data.u64 == 77;
	}
}

static int take_error(int fd)
{
	int error = -1;
	socklen_t length = sizeof(error);

	NEED(getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && length == sizeof(error));
	return error;
}

/* Returns a nonblocking socket that connects to a port. */
static int start_connecting(int to)
{
	struct sockaddr_in addr = loopback(to);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);

	NEED(fd >= 0 && is_rsocket(fd));
	CHECK(connect(fd, (struct sockaddr *)&addr, sizeof(addr)) == -1 && errno == EINPROGRESS);
	return fd;
}

/* A nonblocking connect to a TCP server falls back to TCP while the program waits. To an rsocket it
 * stays an rsocket, and if nobody listens, the error is reported once. */
static void test_fallback_while_waiting(int echo)
{
	struct sockaddr_in addr = loopback(0);
	socklen_t length = sizeof(addr);
	int by, fd, unused, accepted;
	char octet = 0;

	for (by = 0; by < WAITS; by++) {
		fd = start_connecting(echo);
		CHECK(wait_writable(fd, by) && take_error(fd) == 0);
		CHECK(!is_rsocket(fd) && fcntl(fd, F_GETFL) & O_NONBLOCK);
		NEED(fcntl(fd, F_SETFL, 0) == 0);
		CHECK(write(fd, "z", 1) == 1 && read(fd, &octet, 1) == 1 && octet == 'z');
		CHECK(close(fd) == 0);

		fd = start_connecting(port);
		CHECK(wait_writable(fd, by) && take_error(fd) == 0 && is_rsocket(fd));
		NEED((accepted = accept(listener, NULL, NULL)) >= 0 && is_rsocket(accepted));
		CHECK(write(fd, "y", 1) == 1 && read(accepted, &octet, 1) == 1 && octet == 'y');
		CHECK(close(accepted) == 0 && close(fd) == 0);

		/* A bound port on which nobody listens. */
		NEED((unused = socket(AF_INET, SOCK_STREAM, 0)) >= 0);
		addr = loopback(0);
		NEED(bind(unused, (struct sockaddr *)&addr, length) == 0);
		NEED(getsockname(unused, (struct sockaddr *)&addr, &length) == 0);
		fd = start_connecting(ntohs(addr.sin_port));
		wait_writable(fd, by);
		CHECK(take_error(fd) == ECONNREFUSED);
		CHECK(take_error(fd) == 0);
		CHECK(close(fd) == 0 && close(unused) == 0);
	}
}

static int request_works(int fd)
{
	char octet = 0;

	return write(fd, "q", 1) == 1 && read(fd, &octet, 1) == 1 && octet == 'q' && is_rsocket(fd);
}

static int reply_works(int fd)
{
	char octet = 0;

	return read(fd, &octet, 1) == 1 && write(fd, &octet, 1) == 1 && is_rsocket(fd) && has_ended(fd);
}

static int child_succeeded(pid_t child)
{
	int status = -1;

	return waitpid(child, &status, 0) == child && status == 0;
}

/* With RDMAV_FORK_SAFE, the first use of a connection keeps its options, its flags and errno. */
static void test_first_use(const struct sockaddr_in *addr)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1, value = 0;
	pid_t worker = fork();
	socklen_t length = sizeof(value);
	char octet;

	if (worker == 0) {
		fd = accept(listener, NULL, NULL);
		_exit(!(fd >= 0 && reply_works(fd) && close(fd) == 0));
	}
	NEED(fd >= 0 && connect(fd, (struct sockaddr *)addr, sizeof(*addr)) == 0);
	NEED(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) == 0);
	NEED(fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
	errno = 0;
	CHECK(write(fd, "q", 1) == 1 && errno == 0 && is_rsocket(fd));
	CHECK(fcntl(fd, F_GETFL) & O_NONBLOCK && fcntl(fd, F_SETFL, 0) == 0);
	CHECK(getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &value, &length) == 0 && value);
	CHECK(read(fd, &octet, 1) == 1 && close(fd) == 0 && child_succeeded(worker));
}

static int count_descriptors(void)
{
	int fd, n = 0;

	for (fd = 0; fd < 256; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

/* With RDMAV_FORK_SAFE, a closed connection leaves no open descriptor, and a duplicate works. The
 * library closes the last connections in the background. */
static void test_no_descriptor_leaks(const struct sockaddr_in *addr)
{
	int round, fd, copy, before = 0;
	pid_t client;

	for (round = 0; round < 6; round++) {
		client = fork();
		if (client == 0) {
			fd = socket(AF_INET, SOCK_STREAM, 0);
			_exit(!(connect(fd, (struct sockaddr *)addr, sizeof(*addr)) == 0 && request_works(fd) &&
				close(fd) == 0));
		}
		NEED((fd = accept(listener, NULL, NULL)) >= 0 && (copy = dup(fd)) >= 0 && close(fd) == 0);
		CHECK(reply_works(copy) && close(copy) == 0 && child_succeeded(client));
		if (round == 0)
			before = count_descriptors();
	}
	for (round = 0; round < 200 && count_descriptors() > before + 2; round++)
		usleep(50000);
	CHECK(count_descriptors() <= before + 2);
}

/* With RDMAV_FORK_SAFE, the number of a connection that was closed before its first use can be used
 * by a datagram socket. */
static void test_reused_descriptor(const struct sockaddr_in *addr)
{
	struct sockaddr_in to = loopback(0);
	socklen_t length = sizeof(to);
	int fd, receiver = socket(AF_INET, SOCK_DGRAM, 0);
	char octets[16];
	pid_t client = fork();

	if (client == 0) {
		fd = socket(AF_INET, SOCK_STREAM, 0);
		_exit(!(connect(fd, (struct sockaddr *)addr, sizeof(*addr)) == 0 && read(fd, octets, 1) == 0));
	}
	NEED(receiver >= 0 && bind(receiver, (struct sockaddr *)&to, sizeof(to)) == 0);
	NEED(getsockname(receiver, (struct sockaddr *)&to, &length) == 0);
	NEED((fd = accept(listener, NULL, NULL)) >= 0 && close(fd) == 0);
	NEED(socket(AF_INET, SOCK_DGRAM, 0) == fd && connect(fd, (struct sockaddr *)&to, length) == 0);
	CHECK(write(fd, "u", 1) == 1 && recv(receiver, octets, sizeof(octets), 0) == 1);
	CHECK(close(fd) == 0 && close(receiver) == 0 && child_succeeded(client));
}

/* With RDMAV_FORK_SAFE, children can use the listener, and connections accepted by the parent. */
static void test_workers(void)
{
	struct sockaddr_in addr;
	int round, fd;
	pid_t worker, client;

	listen_on_free_port();
	CHECK(!is_rsocket(listener));
	addr = loopback(port);
	for (round = 0; round < 3; round++) {
		worker = fork();
		if (worker == 0) {
			fd = accept(listener, NULL, NULL);
			_exit(!(fd >= 0 && reply_works(fd) && close(fd) == 0));
		}
		fd = socket(AF_INET, SOCK_STREAM, 0);
		NEED(fd >= 0 && connect(fd, (struct sockaddr *)&addr, sizeof(addr)) == 0);
		CHECK(!is_rsocket(fd));
		CHECK(request_works(fd) && close(fd) == 0);
		CHECK(child_succeeded(worker));

		client = fork();
		if (client == 0) {
			fd = socket(AF_INET, SOCK_STREAM, 0);
			_exit(!(connect(fd, (struct sockaddr *)&addr, sizeof(addr)) == 0 && request_works(fd) &&
				close(fd) == 0));
		}
		NEED((fd = accept(listener, NULL, NULL)) >= 0);
		worker = fork();
		if (worker == 0)
			_exit(!(reply_works(fd) && close(fd) == 0));
		CHECK(close(fd) == 0);
		CHECK(child_succeeded(client) && child_succeeded(worker));
	}
	test_first_use(&addr);
	test_no_descriptor_leaks(&addr);
	test_reused_descriptor(&addr);
}

int main(int argc, char **argv)
{
	NEED(argc >= 2);
	alarm(50);
	if (argc > 2 && !strcmp(argv[2], "nonblocking")) {
		test_nonblocking_fallback(atoi(argv[1]));
		printf("%d checks, %d failed\n", checks, failures);
		return failures != 0;
	}
	if (!strcmp(argv[1], "workers")) {
		test_workers();
		CHECK(close(listener) == 0);
		printf("%d checks, %d failed\n", checks, failures);
		return failures != 0;
	}
	listen_on_free_port();
	test_duplicates();
	test_sendfile();
	test_select();
	test_poll();
	test_flags();
	test_epoll();
	test_socket_type();
	test_size_variables();
	test_tcp_fallback(atoi(argv[1]));
	test_fallback_while_waiting(atoi(argv[1]));
	CHECK(close(listener) == 0);
	printf("%d checks, %d failed\n", checks, failures);
	return failures != 0;
}
