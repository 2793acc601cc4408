/* Tests of a process that forks before and after it uses the library, executes another program
 * while connected, becomes a daemon, cancels threads in the library, or exits with live
 * connections. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "connection.h"

enum end { RETURN, EXIT_HANDLER, OTHER_THREAD, IMMEDIATE, KILLED };

static const char *self;
/* The number of descriptors at the start, including those inherited from the parent. */
static char descriptors_at_start[16];

static void *serve(void *p)
{
	struct peer *peer = p;

	accept_connection(peer);
	exchange_words(peer, "pong", "ping");
	rdma_ack_cm_event(next_event(peer, RDMA_CM_EVENT_DISCONNECTED));
	end_connection(peer);
	return NULL;
}

static void use_library(void)
{
	static struct peer server, client;
	pthread_t thread;
	int port;

	memset(&server, 0, sizeof(server));
	memset(&client, 0, sizeof(client));
	port = listen_on_free_port(&server);
	NEED(pthread_create(&thread, NULL, serve, &server) == 0);
	connect_to_port(&client, port);
	exchange_words(&client, "ping", "pong");
	CODE(0, rdma_disconnect(client.id));
	rdma_ack_cm_event(next_event(&client, RDMA_CM_EVENT_DISCONNECTED));
	end_connection(&client);
	NEED(pthread_join(thread, NULL) == 0);
}

/* Runs `body` in a child process, and checks that none of its checks fails. */
static void in_child(void (*body)(void))
{
	pid_t child = fork();
	int status = 0;

	NEED(child >= 0);
	if (child == 0) {
		checks = failures = 0;
		alarm(50);
		body();
		_exit(failures != 0);
	}
	NEED(waitpid(child, &status, 0) == child);
	CODE(0, status);
}

/* Uses the library in a daemon, which is a grandchild whose parent has exited. It has its own
 * session without a terminal, and reports its result through a pipe. */
static void test_daemon(void)
{
	int ends[2], status = 0;
	char word = 0;
	pid_t child;

	NEED(pipe(ends) == 0);
	child = fork();
	NEED(child >= 0);
	if (child == 0) {
		setsid();
		if (fork())
			_exit(0);
		alarm(50);
		checks = failures = 0;
		for (int fd = 0; fd < 3; fd++)
			dup2(open("/dev/null", O_RDWR), fd);
		NEED(chdir("/") == 0);
		use_library();
		word = failures ? 'n' : 'y';
		NEED(write(ends[1], &word, 1) == 1);
		_exit(0);
	}
	close(ends[1]);
	NEED(waitpid(child, &status, 0) == child);
	CODE(1, (int)read(ends[0], &word, 1));
	CHECK(word == 'y');
	close(ends[0]);
}

static int open_descriptors(void)
{
	DIR *dir = opendir("/proc/self/fd");
	int n = -1; /* without the descriptor of the folder */

	NEED(dir);
	for (struct dirent *entry; (entry = readdir(dir));)
		n += entry->d_name[0] != '.';
	closedir(dir);
	return n;
}

/* A child executes another program while its parent has a live connection. The program does not
 * inherit the library's descriptors, and the connection continues. */
static void test_execute_another_program(void)
{
	static struct peer server, client;
	pthread_t thread;
	int port = listen_on_free_port(&server), status = 0, ends[2];
	pid_t child;

	NEED(pthread_create(&thread, NULL, serve, &server) == 0);
	connect_to_port(&client, port);
	NEED(pipe(ends) == 0);
	child = fork();
	NEED(child >= 0);
	if (child == 0) {
		for (int fd = 0; fd < 3; fd++)
			dup2(fd == 0 ? ends[0] : fd, fd);
		close(ends[0]);
		close(ends[1]);
		execl(self, self, "count", descriptors_at_start, NULL);
		_exit(127);
	}
	close(ends[0]);
	exchange_words(&client, "ping", "pong");
	CODE(0, rdma_disconnect(client.id));
	/* The other program is still running here, but it does not keep the connection open. */
	rdma_ack_cm_event(next_event(&client, RDMA_CM_EVENT_DISCONNECTED));
	NEED(pthread_join(thread, NULL) == 0);
	end_connection(&client);
	close(ends[1]);
	NEED(waitpid(child, &status, 0) == child);
	CODE(0, status);
}

/* The executed program. It waits for the end of its input, and checks that it has only the
 * descriptors that its parent had at the start. */
static int count_descriptors(int wanted)
{
	char octet;

	while (read(0, &octet, 1) > 0)
		;
	return open_descriptors() == wanted ? 0 : 1;
}

static void connect_and_exit(void);
static enum end exit_kind;
static int to_port;

static void exit_handler(void)
{
	/* The library still works in an exit handler of the program. */
	use_library();
}

static void *exit_thread(void *unused)
{
	(void)unused;
	exit(0);
}

static void connect_and_exit(void)
{
	static struct peer client;
	pthread_t thread;

	if (exit_kind == EXIT_HANDLER)
		atexit(exit_handler);
	connect_to_port(&client, to_port);
	exchange_words(&client, "ping", "pong");
	switch (exit_kind) {
	case OTHER_THREAD:
		NEED(pthread_create(&thread, NULL, exit_thread, NULL) == 0);
		/* Busy in the library while the process exits. */
		for (;;) {
			struct ibv_wc wc;
			ibv_poll_cq(client.cq, 1, &wc);
		}
	case IMMEDIATE:
		_exit(0);
	case KILLED:
		raise(SIGKILL);
		break;
	default:
		exit(0);
	}
}

/* A child with a live connection exits in each way. Its peer gets a disconnect event, and the exit
 * code is the expected one. */
static void test_exit_with_live_connection(void)
{
	static const enum end exit_kinds[] = { RETURN, EXIT_HANDLER, OTHER_THREAD, IMMEDIATE, KILLED };

	for (size_t i = 0; i < sizeof(exit_kinds) / sizeof(*exit_kinds); i++) {
		static struct peer server;
		int status = 0;
		pid_t child;

		memset(&server, 0, sizeof(server));
		to_port = listen_on_free_port(&server);
		exit_kind = exit_kinds[i];
		child = fork();
		NEED(child >= 0);
		if (child == 0) {
			checks = failures = 0;
			alarm(50);
			connect_and_exit();
		}
		accept_connection(&server);
		exchange_words(&server, "pong", "ping");
		rdma_ack_cm_event(next_event(&server, RDMA_CM_EVENT_DISCONNECTED));
		NEED(waitpid(child, &status, 0) == child);
		CODE(exit_kind == KILLED ? SIGKILL : 0, status);
		end_connection(&server);
	}
}

static struct peer idle;

static void *serve_twice(void *p)
{
	struct peer *peer = p;

	accept_connection(peer);
	exchange_words(peer, "pong", "ping");
	/* Completion 1 is the client's second message, after it has cancelled its threads. */
	CODE(1, (int)next_completion(peer).wr_id);
	send_word(peer, "pong");
	CODE(2, (int)next_completion(peer).wr_id);
	rdma_ack_cm_event(next_event(peer, RDMA_CM_EVENT_DISCONNECTED));
	end_connection(peer);
	return NULL;
}

/* Reads all asynchronous events, such as COMM_EST, so that the next read waits. */
static void drain_async_events(void)
{
	struct ibv_context *verbs = idle.id->verbs;
	struct ibv_async_event event;

	NEED(fcntl(verbs->async_fd, F_SETFL, O_NONBLOCK) == 0);
	while (ibv_get_async_event(verbs, &event) == 0)
		ibv_ack_async_event(&event);
	NEED(fcntl(verbs->async_fd, F_SETFL, 0) == 0);
}

static void *wait_for_completion(void *unused)
{
	struct ibv_cq *cq;
	void *own;

	(void)unused;
	ibv_get_cq_event(idle.completions, &cq, &own);
	return NULL;
}

static void *wait_for_connection_event(void *unused)
{
	struct rdma_cm_event *event;

	(void)unused;
	rdma_get_cm_event(idle.channel, &event);
	return NULL;
}

static void *wait_for_asynchronous_event(void *unused)
{
	struct ibv_async_event event;

	(void)unused;
	ibv_get_async_event(idle.id->verbs, &event);
	return NULL;
}

/* Calls the library in a loop. A cancellation request arrives at any time, but takes effect only
 * outside the library. */
static void *poll_and_create_objects(void *unused)
{
	struct ibv_context *verbs = idle.id->verbs;
	struct ibv_wc wc;

	(void)unused;
	for (;;) {
		struct ibv_comp_channel *channel;
		struct ibv_cq *cq;
		struct ibv_device **list;
		struct ibv_mr *mr;

		for (int i = 0; i < 20; i++)
			NEED(ibv_poll_cq(idle.cq, 1, &wc) == 0);
		channel = ibv_create_comp_channel(verbs);
		cq = ibv_create_cq(verbs, 10, NULL, channel, 0);
		mr = ibv_reg_mr(idle.pd, idle.buffer, 100, IBV_ACCESS_LOCAL_WRITE);
		list = ibv_get_device_list(NULL);
		NEED(channel && cq && mr && list);
		ibv_free_device_list(list);
		NEED(ibv_dereg_mr(mr) == 0 && ibv_destroy_cq(cq) == 0 && ibv_destroy_comp_channel(channel) == 0);
		pthread_testcancel();
	}
	return NULL;
}

static void test_cancel_threads(void)
{
	void *(*const bodies[])(void *) = { wait_for_completion, wait_for_connection_event,
		wait_for_asynchronous_event, poll_and_create_objects };
	static struct peer server;
	pthread_t thread, other;
	void *result;
	int port = listen_on_free_port(&server), before = 0;

	NEED(pthread_create(&other, NULL, serve_twice, &server) == 0);
	connect_to_port(&idle, port);
	exchange_words(&idle, "ping", "pong");
	drain_async_events();
	for (int round = 0; round < 40; round++) {
		if (round == 8)
			before = open_descriptors();
		NEED(pthread_create(&thread, NULL, bodies[round % 4], NULL) == 0);
		usleep((useconds_t)(round * 997 % 8000));
		NEED(pthread_cancel(thread) == 0);
		NEED(pthread_join(thread, &result) == 0);
		CHECK(result == PTHREAD_CANCELED);
	}
	CHECK(open_descriptors() <= before);
	exchange_words(&idle, "ping", "pong");
	CODE(0, rdma_disconnect(idle.id));
	rdma_ack_cm_event(next_event(&idle, RDMA_CM_EVENT_DISCONNECTED));
	NEED(pthread_join(other, NULL) == 0);
	end_connection(&idle);
}

static void *create_queues(void *channel)
{
	for (int i = 0; i < 2000; i++) {
		struct ibv_cq *cq = ibv_create_cq(((struct ibv_comp_channel *)channel)->context, 1, NULL, channel,
			0);

		NEED(cq && ibv_destroy_cq(cq) == 0);
	}
	return NULL;
}

/* The channel's `refcnt`, the number of its completion queues, is correct after several threads
 * have created and destroyed queues. */
static void test_channel_reference_count(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *verbs;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	pthread_t threads[4];

	NEED(list && list[0] && (verbs = ibv_open_device(list[0])) &&
		(channel = ibv_create_comp_channel(verbs)));
	ibv_free_device_list(list);
	NEED(cq = ibv_create_cq(verbs, 1, NULL, channel, 0));
	for (int i = 0; i < 4; i++)
		NEED(pthread_create(&threads[i], NULL, create_queues, channel) == 0);
	for (int i = 0; i < 4; i++)
		NEED(pthread_join(threads[i], NULL) == 0);
	CHECK(channel->refcnt == 1);
	CODE(EBUSY, ibv_destroy_comp_channel(channel));
	CODE(0, ibv_destroy_cq(cq));
	CHECK(channel->refcnt == 0);
	CODE(0, ibv_destroy_comp_channel(channel));
	CODE(0, ibv_close_device(verbs));
}

int main(int argc, char **argv)
{
	static char path[4096];

	if (argc > 2 && strcmp(argv[1], "count") == 0)
		return count_descriptors(atoi(argv[2]));
	NEED(readlink("/proc/self/exe", path, sizeof(path) - 1) > 0);
	self = path;
	snprintf(descriptors_at_start, sizeof(descriptors_at_start), "%d", open_descriptors());
	in_child(use_library);
	test_daemon();
	use_library();
	in_child(use_library);
	test_daemon();
	test_execute_another_program();
	test_exit_with_live_connection();
	test_cancel_threads();
	test_channel_reference_count();
	use_library();
	return result();
}
