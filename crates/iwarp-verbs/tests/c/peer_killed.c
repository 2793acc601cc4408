/* Tests of a connection manager peer that is killed during traffic, as client and as server. The
 * other process gets a disconnect event, all its requests complete, and nothing leaks. The argument
 * is the face of the device. */
#define _GNU_SOURCE
#include "usage.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <sys/wait.h>

#include "connection.h"

enum { LARGE = 1 << 20, DEPTH = 4, TRAFFIC = 12, ROUNDS = 4 };

/* The memory that the peer may read. */
struct remote_memory {
	uint64_t address;
	uint32_t key;
};

static int roce;
static char large[2 * LARGE];

static void post(struct peer *p, struct ibv_mr *mr, enum ibv_wr_opcode op,
	struct remote_memory from)
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

/* Exchanges the addresses for Reads, and fills the queues with Sends and Reads in turn. */
static struct remote_memory start_traffic(struct peer *p, struct ibv_mr **mr)
{
	struct remote_memory other, own = { .address = (uintptr_t)large };
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
	/* The peer may already send its first requests. */
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
static void continue_traffic(struct peer *p, struct ibv_mr *mr, struct remote_memory other)
{
	struct ibv_wc wc = next_completion(p);

	if (wc.wr_id == 99)
		receive(p, mr);
	else
		post(p, mr, (enum ibv_wr_opcode)wc.wr_id, other);
}

/* The process that is killed. As a server it reports its port, and as a client it receives one. */
static void run_victim(int from, int to, int serves)
{
	struct peer p = { 0 };
	struct remote_memory other;
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
	other = start_traffic(&p, &mr);
	for (;;)
		continue_traffic(&p, mr, other);
}

/* Expects the completions of all requests. Finished requests are successful, and all others are
 * flushed. On a RoCE NIC the first unfinished send request fails with RETRY_EXC_ERR. */
static void expect_all_completions(struct peer *p)
{
	int left[2] = { DEPTH + 1, DEPTH + 1 }, failed[2] = { 0 }, i;

	for (i = 0; left[0] + left[1] && i < 20000; i++) {
		struct ibv_wc wc;

		if (ibv_poll_cq(p->cq, 1, &wc) == 0) {
			usleep(1000);
			continue;
		}
		int is_receive = wc.wr_id == 99;

		left[is_receive]--;
		CHECK(left[is_receive] >= 0);
		if (failed[is_receive] || wc.status != IBV_WC_SUCCESS) {
			int is_lost = roce && !is_receive && !failed[0];

			CODE(is_lost ? IBV_WC_RETRY_EXC_ERR : IBV_WC_WR_FLUSH_ERR, wc.status);
			failed[is_receive] = 1;
		}
	}
	CODE(0, left[0] + left[1]);
	/* All receives may have been successful, but the last Read must have failed. */
	CHECK(failed[0]);
}

static void expect_disconnect(struct peer *p)
{
	struct ibv_qp_init_attr init;
	struct rdma_cm_event *event;
	struct ibv_qp_attr attr;
	struct pollfd fd = { .fd = p->channel->fd, .events = POLLIN };

	NEED(poll(&fd, 1, 20000) == 1);
	event = next_event(p, RDMA_CM_EVENT_DISCONNECTED);
	CHECK(event->id == p->id);
	CODE(0, rdma_ack_cm_event(event));
	expect_all_completions(p);
	CODE(0, ibv_query_qp(p->id->qp, &attr, IBV_QP_STATE, &init));
	CODE(IBV_QPS_ERR, attr.qp_state);
}

/* Kills the peer of a connection. The peer is the server (1) or the client (0). */
static void test_killed_peer(int serves)
{
	struct peer p = { 0 };
	int to_child[2], to_parent[2], port;
	struct remote_memory other;
	struct ibv_mr *mr;
	pid_t child;

	NEED(!pipe2(to_child, O_CLOEXEC) && !pipe2(to_parent, O_CLOEXEC) && (child = fork()) >= 0);
	if (!child)
		run_victim(to_child[0], to_parent[1], serves);
	if (serves) {
		NEED(read(to_parent[0], &port, sizeof(port)) == sizeof(port));
		connect_to_port(&p, port);
	} else {
		port = listen_on_free_port(&p);
		NEED(write(to_child[1], &port, sizeof(port)) == sizeof(port));
		accept_connection(&p);
	}
	other = start_traffic(&p, &mr);
	for (int i = 0; i < TRAFFIC; i++)
		continue_traffic(&p, mr, other);
	NEED(!kill(child, SIGKILL) && waitpid(child, NULL, 0) == child);
	/* At least these two requests fail. */
	post(&p, mr, IBV_WR_RDMA_READ, other);
	receive(&p, mr);
	expect_disconnect(&p);
	rdma_destroy_qp(p.id);
	CODE(0, ibv_dereg_mr(mr));
	end_connection(&p);
	for (int i = 0; i < 2; i++) {
		close(to_child[i]);
		close(to_parent[i]);
	}
}

int main(int argc, char **argv)
{
	roce = argc > 1 && !strcmp(argv[1], "roce");
	for (int serves = 0; serves < 2; serves++)
		check_no_leaks("killed", test_killed_peer, serves, ROUNDS);
	return result();
}
