/* Runs commands in the guest. Each TCP connection carries one command.
 *
 * The client sends a line with a time limit in seconds and the length of a shell command, and then
 * the command. It receives the command's output, then an octet 0 and the exit status in decimal. If
 * the client closes the connection or the time limit expires, the agent kills the command and
 * everything that it started. Status 124 means that the limit expired.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static long now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int put(int s, const char *p, size_t n)
{
	while (n) {
		ssize_t k = send(s, p, n, MSG_NOSIGNAL);
		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0)
			return -1;
		p += k;
		n -= (size_t)k;
	}
	return 0;
}

/* Forwards available input. Returns 0 at the end of the input, or if writing fails. */
static int relay(int from, int to)
{
	char buf[4096];
	ssize_t n = read(from, buf, sizeof buf);
	if (n < 0)
		return errno == EAGAIN || errno == EINTR;
	return n > 0 && put(to, buf, (size_t)n) == 0;
}

/* Reads a command and its time limit in seconds. Returns 0, or -1 if the request is invalid. */
static int read_command(int s, char *command, size_t size, long *seconds)
{
	char line[32];
	size_t n = 0, len;
	while (n < sizeof line - 1) {
		if (read(s, line + n, 1) <= 0)
			return -1;
		if (line[n++] == '\n')
			break;
	}
	line[n] = 0;
	if (sscanf(line, "%ld %zu", seconds, &len) != 2 || len >= size)
		return -1;
	for (n = 0; n < len;) {
		ssize_t k = read(s, command + n, len - n);
		if (k <= 0)
			return -1;
		n += (size_t)k;
	}
	return 0;
}

/* Starts the command in a session of its own. Its output can be read from *output. Returns the
 * process, or -1. */
static pid_t start(const char *command, int s, int *output)
{
	int p[2];
	if (pipe(p))
		return -1;
	pid_t child = fork();
	if (child == 0) {
		setsid();
		signal(SIGPIPE, SIG_DFL);
		signal(SIGCHLD, SIG_DFL);
		dup2(p[1], 1);
		dup2(p[1], 2);
		close(p[0]);
		close(p[1]);
		close(s);
		execl("/bin/sh", "sh", "-c", command, (char *)0);
		_exit(127);
	}
	close(p[1]);
	*output = p[0];
	return child;
}

static void serve(int s)
{
	static char command[65536];
	long seconds;
	int output, status = 0, timed_out = 0, exited = 0;
	if (read_command(s, command, sizeof command, &seconds))
		return;
	long end = now() + 1000 * seconds;
	pid_t child = start(command, s, &output);
	if (child < 0)
		return;
	struct pollfd f[2] = { { output, POLLIN, 0 }, { s, POLLRDHUP, 0 } };
	for (;;) {
		poll(f, 2, exited ? 0 : 20);
		if (f[1].revents) {
			kill(-child, SIGKILL);
			return;
		}
		if (f[0].revents && !relay(output, s)) {
			/* the pipe is closed, but the command may still be running */
			f[0].fd = -1;
			f[0].revents = 0;
		} else if (exited && !f[0].revents) {
			/* background processes of the command may keep the pipe open for ever */
			break;
		}
		if (!exited && waitpid(child, &status, WNOHANG) == child)
			exited = 1;
		if (exited && f[0].fd < 0)
			break;
		if (!timed_out && now() > end) {
			timed_out = 1;
			kill(-child, SIGKILL);
		}
	}
	char tail[16];
	int code =
		timed_out ? 124 : WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
	int digits = snprintf(tail + 1, sizeof tail - 1, "%d", code);
	tail[0] = 0;
	put(s, tail, (size_t)digits + 1);
}

int main(int argc, char **argv)
{
	struct sockaddr_in a = { .sin_family = AF_INET,
				 .sin_port =
					htons((unsigned short)atoi(argc > 1 ? argv[1] : "22")) };
	int one = 1, l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (bind(l, (struct sockaddr *)&a, sizeof a) || listen(l, 64)) {
		perror("agent");
		return 1;
	}
	/* This is process 1, which inherits orphans. With SIG_IGN, the kernel reaps them. */
	signal(SIGCHLD, SIG_IGN);
	for (;;) {
		int s = accept4(l, NULL, NULL, SOCK_CLOEXEC);
		if (s < 0)
			continue;
		if (fork() == 0) {
			signal(SIGCHLD, SIG_DFL);
			close(l);
			serve(s);
			_exit(0);
		}
		close(s);
	}
}
