/* Ends programs in several ways while their peer neither reads nor closes the connection. Each
 * program must end within a time limit.
 *
 * stubborn ADDR PORT
 *
 * stubborn ADDR PORT COUNT COMMAND...
 *
 * The peer is a process with a plain TCP socket that performs MPA start-up only. The programs
 * connect to it or accept its connection. They destroy their queue pair, exit, or are killed, in
 * each of these states: nothing sent, more sent than the peer's window, after a disconnect, after
 * the peer sent an invalid FPDU, and after the peer reset the connection. One more program
 * disconnects, and waits for the event. The output shows how long each program took to end. Exit
 * status: 1 if one took longer than LIMIT (the program that waits: LIMIT + LINGER), or a step
 * failed.
 *
 * With COUNT, as many programs send more than their peers read, and do not end, while COMMAND runs.
 * The exit status is that of COMMAND.
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

#define LIMIT 8.0 /* seconds that the end of a program may take */
#define WRITES 64
#define OCTETS (256 * 1024)

#define LINGER 60.0 /* the module's linger time, in seconds */

enum way { DESTROYS, EXITS, IS_KILLED, WAYS, WAITS = WAYS, STAYS };
static const char *const ways[WAYS + 1] = { "destroys its queue pair", "exits", "is killed",
					    "waits for the disconnect event" };

enum state { IDLE, DISCONNECTED, BROKEN, BUSY, RESET, STATES };
static const char *const states[STATES] = { "", ", has disconnected",
					    ", has received an invalid FPDU",
						", has more to send than the peer reads",
						    ", has unread data, and was reset" };

static struct sockaddr_in address;
static unsigned char memory[OCTETS];
/* A pipe: the program writes an octet to it just before it ends. */
static int leaving[2];

static void fail_if(int bad, const char *what)
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

/* Accepts a connection and its MPA request. */
static int accept_program(int listener)
{
	struct frame frame;
	int s = accept(listener, NULL, NULL);
	size_t enhanced;

	fail_if(s < 0 || read_frame(s, &frame), "the request");
	memcpy(frame.key, "MPA ID Rep Frame", sizeof frame.key);
	enhanced = frame.revision == 2 ? 4 : 0;
	frame.high = 0;
	frame.low = (unsigned char)enhanced;
	fail_if(send(s, &frame, HEADER_LEN + enhanced, 0) != (ssize_t)(HEADER_LEN + enhanced),
		"the reply");
	return s;
}

static int connect_to_program(void)
{
	struct frame frame = { .revision = 1 };
	int s = socket(AF_INET, SOCK_STREAM, 0);

	memcpy(frame.key, "MPA ID Req Frame", sizeof frame.key);
	/* The program may not be listening yet. */
	for (int i = 0; connect(s, (struct sockaddr *)&address, sizeof address); i++) {
		fail_if(i == 100, "connecting to the program");
		usleep(100000);
	}
	fail_if(send(s, &frame, HEADER_LEN, 0) != HEADER_LEN || read_frame(s, &frame),
		"the reply of the program");
	return s;
}

/* Sends an FPDU with a wrong CRC. */
static void send_invalid_fpdu(int s)
{
	static const char invalid[64] = { 0, 20 };

	fail_if(send(s, invalid, sizeof invalid, 0) != sizeof invalid, "sending an invalid FPDU");
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
		fail_if(bind(listener, (struct sockaddr *)&address, sizeof address) ||
			listen(listener, 1), "listening");
	}
	peer = fork();
	if (!peer) {
		int s = connects ? connect_to_program() : accept_program(listener);

		if (state == BROKEN)
			send_invalid_fpdu(s);
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

	fail_if(rdma_get_cm_event(channel, &event), "an event");
	if (event->event != wanted) {
		printf("failed: %s, status %d, instead of %s\n", rdma_event_str(event->event),
		       event->status, rdma_event_str(wanted));
		_exit(1);
	}
	id = event->id;
	rdma_ack_cm_event(event);
	return id;
}

static void create_queue_pair(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { WRITES, 4, 1, 1, 0 } };

	fail_if(rdma_create_qp(id, NULL, &attr), "the queue pair");
}

static struct rdma_cm_id *establish(struct rdma_event_channel *channel, int responder)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	struct rdma_cm_id *id;

	fail_if(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), "an identifier");
	if (responder) {
		fail_if(rdma_bind_addr(id, (struct sockaddr *)&address) || rdma_listen(id, 1),
			"listening");
		id = wait_for(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
		create_queue_pair(id);
		fail_if(rdma_accept(id, &param), "accepting");
	} else {
		fail_if(rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000),
			"the address");
		wait_for(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
		fail_if(rdma_resolve_route(id, 2000), "the route");
		wait_for(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
		create_queue_pair(id);
		fail_if(rdma_connect(id, &param), "connecting");
	}
	wait_for(channel, RDMA_CM_EVENT_ESTABLISHED);
	return id;
}

static void post_writes(struct rdma_cm_id *id)
{
	struct ibv_mr *mr = ibv_reg_mr(id->pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge sge = { (uintptr_t)memory, sizeof memory, 0 };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE },
		*bad;

	fail_if(!mr, "the region");
	sge.lkey = mr->lkey;
	for (int i = 0; i < WRITES; i++)
		fail_if(ibv_post_send(id->qp, &wr, &bad), "a Write");
}

static void program(enum way way, int responder, enum state state)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *id;

	fail_if(!channel, "the channel");
	id = establish(channel, responder);
	if (state == BUSY || state == RESET)
		post_writes(id);
	else if (state == DISCONNECTED)
		fail_if(rdma_disconnect(id), "disconnecting");
	/* Leaves time for the socket buffers to fill. */
	usleep(500000);
	fail_if(write(leaving[1], "!", 1) != 1, "writing to the pipe");
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

static int check_end(enum way way, int responder, enum state state)
{
	pid_t peer, child;
	int status, in_time;
	double since;
	char octet;

	fail_if(pipe(leaving), "a pipe");
	peer = start_peer(responder, state);
	child = fork();
	if (!child)
		program(way, responder, state);
	/* Now only the program holds the write end, so read() below fails if it exits early. */
	close(leaving[1]);
	fail_if(read(leaving[0], &octet, 1) != 1, "the program");
	close(leaving[0]);
	since = now();
	fail_if(waitpid(child, &status, 0) != child, "waiting");
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

#define MAX_PROGRAMS 64

static int run_beside_programs(int count, char **command)
{
	pid_t all[2 * MAX_PROGRAMS], one;
	int status;
	char octet;

	fail_if(pipe(leaving), "a pipe");
	for (int i = 0; i < count; i++) {
		address.sin_port = htons((unsigned short)(ntohs(address.sin_port) + 1));
		all[2 * i] = start_peer(0, BUSY);
		all[2 * i + 1] = fork();
		if (!all[2 * i + 1])
			program(STAYS, 0, BUSY);
	}
	for (int i = 0; i < count; i++)
		fail_if(read(leaving[0], &octet, 1) != 1, "the programs");
	one = fork();
	if (!one) {
		execvp(command[0], command);
		_exit(127);
	}
	fail_if(waitpid(one, &status, 0) != one, "waiting");
	/* All are killed first and waited for afterwards, because the end of each takes long. */
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
	fail_if(inet_pton(AF_INET, argv[1], &address.sin_addr) != 1, "the address");
	if (argc > 3)
		return atoi(argv[3]) > MAX_PROGRAMS ? 2 : run_beside_programs(atoi(argv[3]),
			argv + 4);
	for (enum way way = 0; way < WAYS; way++)
		for (int responder = 0; responder < 2; responder++)
			for (enum state state = 0; state < (responder ? BUSY : STATES); state++)
				good &= check_end(way, responder, state);
	good &= check_end(WAITS, 0, DISCONNECTED);
	return !good;
}
