/* Tests that after ibv_req_notify_cq(cq, 1), only a solicited Send or a failed request causes an
 * event. */
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdint.h>
#include <unistd.h>

#include "check.h"

enum { LENGTH = 64, TIMEOUT_MS = 20000, QUIET_US = 100000 };

struct end {
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static union ibv_gid gid;
static char buffer[LENGTH];

static void create_end(struct end *e)
{
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC, .sq_sig_all = 1,
	};
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1 };

	e->channel = ibv_create_comp_channel(context);
	e->cq = ibv_create_cq(context, 32, e, e->channel, 0);
	NEED(e->channel && e->cq);
	attr.send_cq = attr.recv_cq = e->cq;
	e->qp = ibv_create_qp(pd, &attr);
	NEED(e->qp);
	NEED(ibv_modify_qp(e->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		IBV_QP_ACCESS_FLAGS) == 0);
}

static void destroy_end(struct end *e)
{
	CODE(0, ibv_destroy_qp(e->qp));
	CODE(0, ibv_destroy_cq(e->cq));
	CODE(0, ibv_destroy_comp_channel(e->channel));
}

static void move_to_rts(struct end *e, const struct end *peer)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .dest_qp_num = peer->qp->qp_num };

	attr.ah_attr.is_global = 1;
	attr.ah_attr.port_num = 1;
	attr.ah_attr.grh.dgid = gid;
	NEED(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_DEST_QPN) == 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS };
	NEED(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE) == 0);
}

static void receive(struct end *e, uint64_t id)
{
	struct ibv_sge sge = { (uintptr_t)buffer, LENGTH, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;

	NEED(ibv_post_recv(e->qp, &wr, &bad) == 0);
}

static struct ibv_wc next_completion(struct end *e)
{
	struct ibv_wc wc;
	int n, left;

	for (left = TIMEOUT_MS; left > 0; left--) {
		n = ibv_poll_cq(e->cq, 1, &wc);
		NEED(n >= 0);
		if (n)
			return wc;
		usleep(1000);
	}
	NEED(!"no completion before the timeout");
	exit(2);
}

static void exchange(struct end *from, struct end *to, unsigned int flags)
{
	struct ibv_sge sge = { (uintptr_t)buffer, LENGTH, mr->lkey };
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .send_flags = flags, .sg_list = &sge,
		.num_sge = 1 }, *bad;

	receive(to, 1);
	NEED(ibv_post_send(from->qp, &wr, &bad) == 0);
	CODE(IBV_WC_SUCCESS, next_completion(to).status);
	CODE(IBV_WC_SUCCESS, next_completion(from).status);
}

static int has_event(struct end *e, int milliseconds)
{
	struct pollfd fd = { .fd = e->channel->fd, .events = POLLIN };

	return poll(&fd, 1, milliseconds) == 1;
}

static void expect_event(struct end *e)
{
	struct ibv_cq *cq;
	void *own;

	NEED(has_event(e, TIMEOUT_MS));
	NEED(ibv_get_cq_event(e->channel, &cq, &own) == 0);
	CHECK(cq == e->cq && own == e);
	ibv_ack_cq_events(cq, 1);
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	struct end a = { 0 }, b = { 0 };

	NEED(list && list[0]);
	context = ibv_open_device(list[0]);
	NEED(context);
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(context);
	NEED(pd && ibv_query_gid(context, 1, 0, &gid) == 0);
	mr = ibv_reg_mr(pd, buffer, LENGTH, IBV_ACCESS_LOCAL_WRITE);
	NEED(mr);
	create_end(&a);
	create_end(&b);
	move_to_rts(&a, &b);
	move_to_rts(&b, &a);
	exchange(&a, &b, 0);

	/* No event for an unsolicited Send. The pause allows for a delayed thread of the library. */
	CODE(0, ibv_req_notify_cq(b.cq, 1));
	exchange(&a, &b, 0);
	usleep(QUIET_US);
	CHECK(!has_event(&b, 0));
	/* The queue is still armed: one event for the first solicited Send, and none for the second. */
	exchange(&a, &b, IBV_SEND_SOLICITED);
	expect_event(&b);
	exchange(&a, &b, IBV_SEND_SOLICITED);
	usleep(QUIET_US);
	CHECK(!has_event(&b, 0));
	/* Armed for all completions: an event for an unsolicited Send. */
	CODE(0, ibv_req_notify_cq(b.cq, 0));
	exchange(&a, &b, 0);
	expect_event(&b);
	/* A failed request causes an event like a solicited one. */
	receive(&b, 2);
	CODE(0, ibv_req_notify_cq(b.cq, 1));
	CODE(0, ibv_modify_qp(b.qp, &error, IBV_QP_STATE));
	expect_event(&b);
	CODE(IBV_WC_WR_FLUSH_ERR, next_completion(&b).status);

	destroy_end(&a);
	destroy_end(&b);
	CODE(0, ibv_dereg_mr(mr));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	return result();
}
