/* The peer of a connection of the connection manager is killed during traffic: the end is an event,
 * all requests complete, and nothing leaks. Either end is killed. The argument is the face. */
#define _GNU_SOURCE
#include "usage.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <sys/wait.h>

#include "connection.h"

enum { LARGE = 1 << 20, DEPTH = 4, TRAFFIC = 12, ROUNDS = 4 };

/* What the peer's Reads may read. */
struct place {
	uint64_t address;
	uint32_t key;
};

static int roce;
static char large[2 * LARGE];

static void post(struct peer *p, struct ibv_mr *mr, enum ibv_wr_opcode op, struct place from)
{
	struct ibv_sge sge = { (uintptr_t)large, LARGE, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = op, .sg_list = &sge, .num_sge = 1, .opcode = op,
		.send_flags = IBV_SEND_SIGNALED, .wr.rdma = { from.address, from.key } }, *bad;

	NEED(ibv_post_send(p->id->qp, &wr, &bad) == 0);
}

static void receive(struct peer *p, struct ibv_mr *mr)
{
	struct ibv_sge sge = { (uintptr_t)large + LARGE, LARGE, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 99, .sg_list = &sge, .num_sge = 1 }, *bad;

	NEED(ibv_post_recv(p->id->qp, &wr, &bad) == 0);
}

/* Tells the peer what it may read, and fills the queues. Sends and Reads alternate. */
static struct place begin(struct peer *p, struct ibv_mr **mr)
{
	struct place other, own = { .address = (uintptr_t)large };
	int due = 3;

	NEED(*mr = ibv_reg_mr(p->pd, large, sizeof(large), IBV_ACCESS_LOCAL_WRITE |
		IBV_ACCESS_REMOTE_READ));
	own.key = (*mr)->rkey;
	for (int i = 0; i < DEPTH; i++)
		receive(p, *mr);
	memcpy(p->buffer + 1024, &own, sizeof(own));
	struct ibv_sge sge = { (uintptr_t)p->buffer + 1024, 64, p->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED }, *bad;
	NEED(ibv_post_send(p->id->qp, &wr, &bad) == 0);
	/* The peer may be ahead. */
	while (due) {
		struct ibv_wc wc = next_completion(p);

		if (wc.wr_id == 99)
			receive(p, *mr);
		else
			due -= wc.wr_id;
	}
	memcpy(&other, p->buffer, sizeof(other));
	for (int i = 0; i < DEPTH; i++)
		post(p, *mr, i % 2 ? IBV_WR_RDMA_READ : IBV_WR_SEND, other);
	return other;
}

/* Polls one completion, and posts another request. */
static void go_on(struct peer *p, struct ibv_mr *mr, struct place other)
{
	struct ibv_wc wc = next_completion(p);

	if (wc.wr_id == 99)
		receive(p, mr);
	else
		post(p, mr, (enum ibv_wr_opcode)wc.wr_id, other);
}

/* The process that is killed. It gets a port, or reports its own. */
static void victim(int from, int to, int serves)
{
	struct peer p = { 0 };
	struct place other;
	struct ibv_mr *mr;
	int port;

	if (serves) {
		port = listen_on_free_port(&p);
		NEED(write(to, &port, sizeof(port)) == sizeof(port));
		accept_connection(&p);
	} else {
		NEED(read(from, &port, sizeof(port)) == sizeof(port));
		connect_to_port(&p, port);
	}
	other = begin(&p, &mr);
	for (;;)
		go_on(&p, mr, other);
}

/* All requests complete, finished ones successfully and all others as flushed. On a RoCE NIC the
 * first unfinished request fails with RETRY_EXC_ERR. */
static void all_complete(struct peer *p)
{
	int left[2] = { DEPTH + 1, DEPTH + 1 }, failed[2] = { 0 }, i;

	for (i = 0; left[0] + left[1] && i < 20000; i++) {
		struct ibv_wc wc;

		if (ibv_poll_cq(p->cq, 1, &wc) == 0) {
			usleep(1000);
			continue;
		}
		int of_receives = wc.wr_id == 99;

		left[of_receives]--;
		CHECK(left[of_receives] >= 0);
		if (failed[of_receives] || wc.status != IBV_WC_SUCCESS) {
			int is_lost = roce && !of_receives && !failed[0];

			CODE(is_lost ? IBV_WC_RETRY_EXC_ERR : IBV_WC_WR_FLUSH_ERR, wc.status);
			failed[of_receives] = 1;
		}
	}
	CODE(0, left[0] + left[1]);
	/* The peer's messages may have filled all receives, but the last Read is never answered. */
	CHECK(failed[0]);
}

static void is_over(struct peer *p)
{
	struct ibv_qp_init_attr init;
	struct rdma_cm_event *event;
	struct ibv_qp_attr attr;
	struct pollfd fd = { .fd = p->channel->fd, .events = POLLIN };

	NEED(poll(&fd, 1, 20000) == 1);
	event = next_event(p, RDMA_CM_EVENT_DISCONNECTED);
	CHECK(event->id == p->id);
	CODE(0, rdma_ack_cm_event(event));
	all_complete(p);
	CODE(0, ibv_query_qp(p->id->qp, &attr, IBV_QP_STATE, &init));
	CODE(IBV_QPS_ERR, attr.qp_state);
}

/* Kills the peer of a connection, which serves (1) or connects (0). */
static void is_killed(int serves)
{
	struct peer p = { 0 };
	int there[2], here[2], port;
	struct place other;
	struct ibv_mr *mr;
	pid_t child;

	NEED(!pipe2(there, O_CLOEXEC) && !pipe2(here, O_CLOEXEC) && (child = fork()) >= 0);
	if (!child)
		victim(there[0], here[1], serves);
	if (serves) {
		NEED(read(here[0], &port, sizeof(port)) == sizeof(port));
		connect_to_port(&p, port);
	} else {
		port = listen_on_free_port(&p);
		NEED(write(there[1], &port, sizeof(port)) == sizeof(port));
		accept_connection(&p);
	}
	other = begin(&p, &mr);
	for (int i = 0; i < TRAFFIC; i++)
		go_on(&p, mr, other);
	NEED(!kill(child, SIGKILL) && waitpid(child, NULL, 0) == child);
	/* At least these are not answered. */
	post(&p, mr, IBV_WR_RDMA_READ, other);
	receive(&p, mr);
	is_over(&p);
	rdma_destroy_qp(p.id);
	CODE(0, ibv_dereg_mr(mr));
	end_connection(&p);
	for (int i = 0; i < 2; i++) {
		close(there[i]);
		close(here[i]);
	}
}

int main(int argc, char **argv)
{
	roce = argc > 1 && !strcmp(argv[1], "roce");
	for (int serves = 0; serves < 2; serves++)
		check_no_leaks("killed", is_killed, serves, ROUNDS);
	return result();
}
