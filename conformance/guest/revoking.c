/* Memory that is deregistered while a peer writes into it or sends from it, and completion queues that are too small.
 *
 * revoking ADDR PORT ROUNDS
 *
 * In each round two queue pairs of this process are connected with each other, and one writes without end into memory of the other. Then the
 * target of the Writes is deregistered, or their source, or nobody takes completions any more. The connection must end with an error, and not an octet of a
 * deregistered target may change after the call has returned. Exit status: 0 if that was so.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WRITES 32
#define OCTETS (64 * 1024)

enum what { TARGET, SOURCE, QUEUE, WHATS };
static const char *const whats[WHATS] = { "the target is deregistered", "the source is deregistered", "nobody takes completions" };

static struct sockaddr_in address;
static unsigned char from[OCTETS], to[WRITES * OCTETS], copy[WRITES * OCTETS];

static void must(int bad, const char *what)
{
	if (bad) {
		printf("failed %s: %s\n", what, strerror(errno));
		exit(1);
	}
}

static struct rdma_cm_id *event(struct rdma_event_channel *channel, enum rdma_cm_event_type wanted)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	must(rdma_get_cm_event(channel, &event), "an event");
	must(event->event != wanted, rdma_event_str(event->event));
	id = event->id;
	rdma_ack_cm_event(event);
	return id;
}

struct pair {
	struct rdma_event_channel *ours, *theirs;
	struct rdma_cm_id *listener, *writer, *target;
	struct ibv_cq *cq, *other;
};

static void make_queue_pair(struct rdma_cm_id *id, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr attr = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { WRITES, 4, 1, 1, 0 }, .sq_sig_all = 1
	};

	must(rdma_create_qp(id, NULL, &attr), "a queue pair");
}

/* `entries`: of the writer's completion queue. */
static struct pair connect_pair(int entries)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	struct pair pair = { .ours = rdma_create_event_channel(), .theirs = rdma_create_event_channel() };

	must(!pair.ours || !pair.theirs, "a channel");
	must(rdma_create_id(pair.theirs, &pair.listener, NULL, RDMA_PS_TCP) ||
		     rdma_bind_addr(pair.listener, (struct sockaddr *)&address) || rdma_listen(pair.listener, 1), "listening");
	must(rdma_create_id(pair.ours, &pair.writer, NULL, RDMA_PS_TCP) ||
		     rdma_resolve_addr(pair.writer, NULL, (struct sockaddr *)&address, 2000), "the address");
	event(pair.ours, RDMA_CM_EVENT_ADDR_RESOLVED);
	must(rdma_resolve_route(pair.writer, 2000), "the route");
	event(pair.ours, RDMA_CM_EVENT_ROUTE_RESOLVED);
	pair.cq = ibv_create_cq(pair.writer->verbs, entries, NULL, NULL, 0);
	pair.other = ibv_create_cq(pair.writer->verbs, 16, NULL, NULL, 0);
	must(!pair.cq || !pair.other, "a completion queue");
	make_queue_pair(pair.writer, pair.cq);
	must(rdma_connect(pair.writer, &param), "connecting");
	pair.target = event(pair.theirs, RDMA_CM_EVENT_CONNECT_REQUEST);
	make_queue_pair(pair.target, pair.other);
	must(rdma_accept(pair.target, &param), "accepting");
	event(pair.theirs, RDMA_CM_EVENT_ESTABLISHED);
	event(pair.ours, RDMA_CM_EVENT_ESTABLISHED);
	return pair;
}

static void take_apart(struct pair *pair)
{
	struct rdma_cm_event *left;

	rdma_destroy_qp(pair->writer);
	rdma_destroy_qp(pair->target);
	must(ibv_destroy_cq(pair->cq) || ibv_destroy_cq(pair->other), "the end of the completion queues");
	/* An identifier goes only when its events are taken. */
	for (struct pollfd ready = { pair->ours->fd, POLLIN, 0 }; poll(&ready, 1, 0) > 0 && !rdma_get_cm_event(pair->ours, &left);)
		rdma_ack_cm_event(left);
	for (struct pollfd ready = { pair->theirs->fd, POLLIN, 0 }; poll(&ready, 1, 0) > 0 && !rdma_get_cm_event(pair->theirs, &left);)
		rdma_ack_cm_event(left);
	must(rdma_destroy_id(pair->writer) || rdma_destroy_id(pair->target) || rdma_destroy_id(pair->listener), "the end of the identifiers");
	rdma_destroy_event_channel(pair->ours);
	rdma_destroy_event_channel(pair->theirs);
}

/* Posts a Write to one of the places. Returns 0 when the queue is full, or takes nothing any more. */
static int post(struct pair *pair, unsigned turn, uint32_t lkey, uint32_t rkey)
{
	struct ibv_sge sge = { (uintptr_t)from, OCTETS, lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE }, *bad;

	wr.wr.rdma.remote_addr = (uintptr_t)to + (size_t)(turn % WRITES) * OCTETS;
	wr.wr.rdma.rkey = rkey;
	return !ibv_post_send(pair->writer->qp, &wr, &bad);
}

/* Goes on writing until a completion has an error. Returns its status, or 0 after ten seconds. */
static enum ibv_wc_status write_on(struct pair *pair, unsigned turns, uint32_t lkey, uint32_t rkey, unsigned *posted)
{
	struct ibv_wc wc;

	for (unsigned done = 0, idle = 0; done < turns && idle < 100000;) {
		while (*posted < WRITES && post(pair, done + *posted, lkey, rkey))
			++*posted;
		if (ibv_poll_cq(pair->cq, 1, &wc) == 1) {
			if (wc.status)
				return wc.status;
			--*posted;
			done++;
			idle = 0;
		} else {
			usleep(100);
			idle++;
		}
	}
	return 0;
}

static int state_of(struct rdma_cm_id *id)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	must(ibv_query_qp(id->qp, &attr, IBV_QP_STATE, &init), "the state");
	return (int)attr.qp_state;
}

static void play(enum what what, unsigned round)
{
	struct pair pair = connect_pair(what == QUEUE ? 4 : 2 * WRITES);
	struct ibv_mr *source = ibv_reg_mr(pair.writer->pd, from, sizeof from, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_mr *target = ibv_reg_mr(pair.target->pd, to, sizeof to, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	uint32_t lkey, rkey;
	unsigned posted = 0;

	must(!source || !target, "a region");
	lkey = source->lkey;
	rkey = target->rkey;
	memset(from, (int)round + 1, sizeof from);
	if (what == QUEUE) {
		while (posted < WRITES && post(&pair, posted, lkey, rkey))
			posted++;
		for (int i = 0; i < 100 && state_of(pair.writer) != IBV_QPS_ERR; i++)
			usleep(100000);
		must(state_of(pair.writer) != IBV_QPS_ERR, "the end of a queue pair whose completion queue has overflowed");
	} else {
		must(write_on(&pair, round % 7 + 1, lkey, rkey, &posted) != 0, "Writes");
		must(ibv_dereg_mr(what == TARGET ? target : source), "deregistration");
		memcpy(copy, to, sizeof to);
		memset(from, (int)round + 101, sizeof from);
		must(!write_on(&pair, 100000, lkey, rkey, &posted), "the error of a Write");
		usleep(20000);
		must(what == TARGET && memcmp(copy, to, sizeof to), "memory that was deregistered has changed");
	}
	if (what != TARGET)
		must(ibv_dereg_mr(target), "the target");
	if (what != SOURCE)
		must(ibv_dereg_mr(source), "the source");
	take_apart(&pair);
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc != 4)
		return 2;
	address = (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(argv[2])) };
	must(inet_pton(AF_INET, argv[1], &address.sin_addr) != 1, "the address");
	for (enum what what = 0; what < WHATS; what++) {
		for (unsigned round = 0; round < (unsigned)atoi(argv[3]); round++)
			play(what, round);
		printf("passed: %s, %s times\n", whats[what], argv[3]);
	}
	return 0;
}
