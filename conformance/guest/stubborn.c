/* A peer that sets up a connection and then neither reads nor closes, and programs that must be
 * able to end nevertheless.
 *
 * stubborn ADDR PORT stubborn ADDR PORT COUNT COMMAND...
 *
 * The peer is a process with plain TCP that knows the start-up of MPA. The programs connect to it
 * or wait for it. They end by destroying their queue pair, by exiting, or by being killed: with
 * nothing sent, with more sent than the peer's window, after a disconnect, after the peer has
 * violated a rule, and after the peer has reset the connection. One program disconnects, and waits
 * for the event. For each program, prints how long its end took. Exit status: 0 unless an end took
 * longer than LIMIT (plus LINGER for the program that waits), or a step failed.
 *
 * With COUNT, this many programs concurrently send more than their peers read, and stay. Meanwhile
 * the command runs. This program exits with its status.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "frame.h"

#define LIMIT 8.0 /* seconds */
#define WRITES 64
#define OCTETS (256 * 1024)

#define LINGER 60.0 /* seconds, the module's */

enum way { DESTROYS, EXITS, IS_KILLED, WAYS, WAITS = WAYS, STAYS };
static const char *const ways[WAYS + 1] = { "destroys its queue pair", "exits", "is killed",
					    "waits to hear of the end" };

enum state { IDLE, DISCONNECTED, BROKEN, BUSY, RESET, STATES };
static const char *const states[STATES] = { "", ", has disconnected",
					    ", has had no FPDU but nonsense", ", has much to send",
						    ", has much to send and a reset" };

static struct sockaddr_in address;
static unsigned char memory[OCTETS];
/* From the program to the observer: it is ending. */
static int leaving[2];

static void must(int bad, const char *what)
{
	if (bad) {
		printf("failed: %s: %s\n", what, strerror(errno));
		_exit(1);
	}
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

/* ---- the peer ---- */

/* Accepts a request. */
static int answer(int listener)
{
	struct frame frame;
	int s = accept(listener, NULL, NULL);
	size_t enhanced;

	must(s < 0 || read_frame(s, &frame), "the request");
	memcpy(frame.key, "MPA ID Rep Frame", sizeof frame.key);
	enhanced = frame.revision == 2 ? 4 : 0;
	frame.high = 0;
	frame.low = (unsigned char)enhanced;
	must(send(s, &frame, HEAD + enhanced, 0) != (ssize_t)(HEAD + enhanced), "the reply");
	return s;
}

static int request(void)
{
	struct frame frame = { .revision = 1 };
	int s = socket(AF_INET, SOCK_STREAM, 0);

	memcpy(frame.key, "MPA ID Req Frame", sizeof frame.key);
	/* The program may not be listening yet. */
	for (int i = 0; connect(s, (struct sockaddr *)&address, sizeof address); i++) {
		must(i == 100, "connecting to the program");
		usleep(100000);
	}
	must(send(s, &frame, HEAD, 0) != HEAD || read_frame(s, &frame), "the reply of the program");
	return s;
}

/* Not an FPDU: its CRC is wrong. */
static void send_nonsense(int s)
{
	static const char nonsense[64] = { 0, 20 };

	must(send(s, nonsense, sizeof nonsense, 0) != sizeof nonsense, "nonsense");
}

static void reset(int s)
{
	struct linger at_once = { .l_onoff = 1 };

	usleep(200000);
	setsockopt(s, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
	close(s);
}

static pid_t start_peer(int connects, enum state state)
{
	int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
	pid_t peer;

	if (!connects) {
		setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
		must(bind(listener, (struct sockaddr *)&address, sizeof address) ||
		     listen(listener, 1), "listening");
	}
	peer = fork();
	if (!peer) {
		int s = connects ? request() : answer(listener);

		if (state == BROKEN)
			send_nonsense(s);
		if (state == RESET)
			reset(s);
		for (;;)
			pause();
	}
	close(listener);
	return peer;
}

/* ---- the program ---- */

static struct rdma_cm_id *wait_for(struct rdma_event_channel *channel,
				   enum rdma_cm_event_type wanted)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	must(rdma_get_cm_event(channel, &event), "an event");
	if (event->event != wanted) {
		printf("failed: %s, status %d, instead of %s\n", rdma_event_str(event->event),
		       event->status, rdma_event_str(wanted));
		_exit(1);
	}
	id = event->id;
	rdma_ack_cm_event(event);
	return id;
}

static void make_queue_pair(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { WRITES, 4, 1, 1, 0 } };

	must(rdma_create_qp(id, NULL, &attr), "the queue pair");
}

static struct rdma_cm_id *connected(struct rdma_event_channel *channel, int responder)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	struct rdma_cm_id *id;

	must(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), "an identifier");
	if (responder) {
		must(rdma_bind_addr(id, (struct sockaddr *)&address) || rdma_listen(id, 1),
		     "listening");
		id = wait_for(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
		make_queue_pair(id);
		must(rdma_accept(id, &param), "accepting");
	} else {
		must(rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000), "the address");
		wait_for(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
		must(rdma_resolve_route(id, 2000), "the route");
		wait_for(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
		make_queue_pair(id);
		must(rdma_connect(id, &param), "connecting");
	}
	wait_for(channel, RDMA_CM_EVENT_ESTABLISHED);
	return id;
}

static void write_much(struct rdma_cm_id *id)
{
	struct ibv_mr *mr = ibv_reg_mr(id->pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge sge = { (uintptr_t)memory, sizeof memory, 0 };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE },
		*bad;

	must(!mr, "the region");
	sge.lkey = mr->lkey;
	for (int i = 0; i < WRITES; i++)
		must(ibv_post_send(id->qp, &wr, &bad), "a Write");
}

static void program(enum way way, int responder, enum state state)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *id;

	must(!channel, "the channel");
	id = connected(channel, responder);
	if (state == BUSY || state == RESET)
		write_much(id);
	else if (state == DISCONNECTED)
		must(rdma_disconnect(id), "disconnecting");
	/* Waits until the send path is full. */
	usleep(500000);
	must(write(leaving[1], "!", 1) != 1, "telling");
	if (way == DESTROYS)
		rdma_destroy_qp(id);
	else if (way == IS_KILLED)
		raise(SIGKILL);
	else if (way == WAITS)
		wait_for(channel, RDMA_CM_EVENT_DISCONNECTED);
	else if (way == STAYS)
		for (;;)
			pause();
	_exit(0);
}

static int leaves(enum way way, int responder, enum state state)
{
	pid_t peer, child;
	int status, in_time;
	double since;
	char octet;

	must(pipe(leaving), "a pipe");
	peer = start_peer(responder, state);
	child = fork();
	if (!child)
		program(way, responder, state);
	/* The program's end of the pipe closes when it exits, which reveals an early exit. */
	close(leaving[1]);
	must(read(leaving[0], &octet, 1) != 1, "the program");
	close(leaving[0]);
	since = now();
	must(waitpid(child, &status, 0) != child, "waiting");
	since = now() - since;
	in_time = since < LIMIT + (way == WAITS ? LINGER : 0) &&
		(way == IS_KILLED ? WIFSIGNALED(status) : !status);
	printf("%s: a program that %s%s, and %s: %.1f s\n", in_time ? "passed" : "failed",
	       responder ? "has accepted" : "has connected",
	       states[state], ways[way], since);
	kill(peer, SIGKILL);
	waitpid(peer, NULL, 0);
	return in_time;
}

#define MOST 64

static int beside(int count, char **command)
{
	pid_t all[2 * MOST], one;
	int status;
	char octet;

	must(pipe(leaving), "a pipe");
	for (int i = 0; i < count; i++) {
		address.sin_port = htons((unsigned short)(ntohs(address.sin_port) + 1));
		all[2 * i] = start_peer(0, BUSY);
		all[2 * i + 1] = fork();
		if (!all[2 * i + 1])
			program(STAYS, 0, BUSY);
	}
	for (int i = 0; i < count; i++)
		must(read(leaving[0], &octet, 1) != 1, "the programs");
	one = fork();
	if (!one) {
		execvp(command[0], command);
		_exit(127);
	}
	must(waitpid(one, &status, 0) != one, "waiting");
	/* The programs run concurrently, because each takes long. */
	for (int i = 0; i < 2 * count; i++)
		kill(all[i], SIGKILL);
	for (int i = 0; i < 2 * count; i++)
		waitpid(all[i], NULL, 0);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int main(int argc, char **argv)
{
	int good = 1;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc != 3 && argc < 5)
		return 2;
	address = (struct sockaddr_in){ .sin_family = AF_INET,
					.sin_port = htons((unsigned short)atoi(argv[2])) };
	must(inet_pton(AF_INET, argv[1], &address.sin_addr) != 1, "the address");
	if (argc > 3)
		return atoi(argv[3]) > MOST ? 2 : beside(atoi(argv[3]), argv + 4);
	for (enum way way = 0; way < WAYS; way++)
		for (int responder = 0; responder < 2; responder++)
			for (enum state state = 0; state < (responder ? BUSY : STATES); state++)
				good &= leaves(way, responder, state);
	good &= leaves(WAITS, 0, DISCONNECTED);
	return !good;
}
