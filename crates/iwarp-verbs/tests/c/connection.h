/* One end of a connection between two threads or processes: set-up, an exchange of words, and
 * destruction. */
#ifndef CONNECTION_H
#define CONNECTION_H

#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <sys/socket.h>

#include "check.h"

struct peer {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *listener, *id;
	struct ibv_pd *pd;
	struct ibv_comp_channel *completions;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	char buffer[4096];
};

static inline struct rdma_cm_event *next_event(struct peer *p, enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event = NULL;

	NEED(rdma_get_cm_event(p->channel, &event) == 0);
	if (event->event != type)
		fprintf(stderr, "%s instead of %s\n", rdma_event_str(event->event), rdma_event_str(type));
	NEED(event->event == type);
	return event;
}

static inline void create_objects(struct peer *p)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 16, 16, 1, 1, 0 } };

	p->pd = ibv_alloc_pd(p->id->verbs);
	p->completions = ibv_create_comp_channel(p->id->verbs);
	NEED(p->pd && p->completions);
	p->cq = ibv_create_cq(p->id->verbs, 64, NULL, p->completions, 0);
	p->mr = ibv_reg_mr(p->pd, p->buffer, sizeof(p->buffer), IBV_ACCESS_LOCAL_WRITE);
	attr.send_cq = attr.recv_cq = p->cq;
	NEED(p->cq && p->mr && rdma_create_qp(p->id, p->pd, &attr) == 0);
}

/* Listens on a free port, and returns the port. */
static inline int listen_on_free_port(struct peer *p)
{
	struct sockaddr_in addr = { .sin_family = AF_INET };

	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	p->channel = rdma_create_event_channel();
	NEED(p->channel && rdma_create_id(p->channel, &p->listener, NULL, RDMA_PS_TCP) == 0);
	NEED(rdma_bind_addr(p->listener, (struct sockaddr *)&addr) == 0 &&
		rdma_listen(p->listener, 4) == 0);
	return ntohs(rdma_get_src_port(p->listener));
}

static inline void post_receive(struct peer *p, uint64_t id)
{
	struct ibv_sge sge = { (uintptr_t)p->buffer, 64, p->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;

	NEED(ibv_post_recv(p->id->qp, &wr, &bad) == 0);
}

static inline void accept_connection(struct peer *p)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	struct rdma_cm_event *event = next_event(p, RDMA_CM_EVENT_CONNECT_REQUEST);

	p->id = event->id;
	rdma_ack_cm_event(event);
	create_objects(p);
	post_receive(p, 1);
	NEED(rdma_accept(p->id, &param) == 0);
	rdma_ack_cm_event(next_event(p, RDMA_CM_EVENT_ESTABLISHED));
}

static inline void connect_to_port(struct peer *p, int port)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };

	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	p->channel = rdma_create_event_channel();
	NEED(p->channel && rdma_create_id(p->channel, &p->id, p, RDMA_PS_TCP) == 0);
	NEED(rdma_resolve_addr(p->id, NULL, (struct sockaddr *)&addr, 5000) == 0);
	rdma_ack_cm_event(next_event(p, RDMA_CM_EVENT_ADDR_RESOLVED));
	NEED(rdma_resolve_route(p->id, 5000) == 0);
	rdma_ack_cm_event(next_event(p, RDMA_CM_EVENT_ROUTE_RESOLVED));
	create_objects(p);
	post_receive(p, 1);
	NEED(rdma_connect(p->id, &param) == 0);
	rdma_ack_cm_event(next_event(p, RDMA_CM_EVENT_ESTABLISHED));
}

static inline struct ibv_wc next_completion(struct peer *p)
{
	struct ibv_wc wc;
	struct ibv_cq *cq;
	void *own;

	for (;;) {
		int n = ibv_poll_cq(p->cq, 1, &wc);

		if (n == 0) {
			NEED(ibv_req_notify_cq(p->cq, 0) == 0);
			n = ibv_poll_cq(p->cq, 1, &wc);
		}
		NEED(n >= 0);
		if (n)
			break;
		NEED(ibv_get_cq_event(p->completions, &cq, &own) == 0);
		ibv_ack_cq_events(cq, 1);
	}
	CODE(IBV_WC_SUCCESS, wc.status);
	return wc;
}

static inline void send_word(struct peer *p, const char *word)
{
	struct ibv_sge sge = { (uintptr_t)p->buffer + 1024, 64, p->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED }, *bad;

	snprintf(p->buffer + 1024, 64, "%s", word);
	NEED(ibv_post_send(p->id->qp, &wr, &bad) == 0);
}

static inline void exchange_words(struct peer *p, const char *mine, const char *theirs)
{
	uint64_t first, second;

	send_word(p, mine);
	first = next_completion(p).wr_id;
	second = next_completion(p).wr_id;
	CHECK(first + second == 3);
	CHECK(strcmp(p->buffer, theirs) == 0);
	post_receive(p, 1);
}

static inline void end_connection(struct peer *p)
{
	rdma_destroy_qp(p->id);
	CODE(0, ibv_dereg_mr(p->mr));
	CODE(0, ibv_destroy_cq(p->cq));
	CODE(0, ibv_destroy_comp_channel(p->completions));
	CODE(0, ibv_dealloc_pd(p->pd));
	CODE(0, rdma_destroy_id(p->id));
	if (p->listener)
		CODE(0, rdma_destroy_id(p->listener));
	rdma_destroy_event_channel(p->channel);
}

#endif
