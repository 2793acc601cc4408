/* Tests of unreliable connections between two queue pairs of this process: lost messages, delivered
 * messages, and unsupported operations. */
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <unistd.h>

#include "check.h"

enum { LENGTH = 100000, TIMEOUT_MS = 20000 };

struct end {
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	char *buffer;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static union ibv_gid gid;

static struct ibv_qp_init_attr attributes(struct ibv_cq *cq)
{
	struct ibv_qp_init_attr attr = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_UC, };
	return attr;
}

static void create_end(struct end *e)
{
	struct ibv_qp_init_attr attr;

	e->buffer = calloc(1, LENGTH);
	e->cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	NEED(e->buffer && e->cq);
	e->mr = ibv_reg_mr(pd, e->buffer, LENGTH, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	attr = attributes(e->cq);
	e->qp = ibv_create_qp(pd, &attr);
	NEED(e->mr && e->qp);
	CODE(IBV_QPT_UC, (int)e->qp->qp_type);
}

static void destroy_end(struct end *e)
{
	CODE(0, ibv_destroy_qp(e->qp));
	CODE(0, ibv_dereg_mr(e->mr));
	CODE(0, ibv_destroy_cq(e->cq));
	free(e->buffer);
}

/* Moves the queue pair to RTS, with the attributes that an unreliable connection requires. */
static void move_to_rts(struct end *e, const struct end *peer)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	struct ibv_qp_init_attr init;

	CODE(0, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		IBV_QP_ACCESS_FLAGS));
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_1024;
	attr.dest_qp_num = peer->qp->qp_num;
	attr.ah_attr = (struct ibv_ah_attr){ .is_global = 1, .port_num = 1,
		.grh = { .dgid = gid, .hop_limit = 1 } };
	CODE(0, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
		IBV_QP_RQ_PSN));
	attr.qp_state = IBV_QPS_RTS;
	CODE(0, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	CODE(0, ibv_query_qp(e->qp, &attr, IBV_QP_STATE, &init));
	CHECK(attr.qp_state == IBV_QPS_RTS && init.qp_type == IBV_QPT_UC);
}

static struct ibv_wc next_completion(struct end *e)
{
	struct ibv_wc wc = { 0 };
	int left;

	for (left = TIMEOUT_MS; left > 0; left--) {
		int n = ibv_poll_cq(e->cq, 1, &wc);

		NEED(n >= 0);
		if (n)
			return wc;
		usleep(1000);
	}
	NEED(!"no completion before the timeout");
	exit(2);
}

static void receive(struct end *e, uint64_t id, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)e->buffer, length, e->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;

	NEED(ibv_post_recv(e->qp, &wr, &bad) == 0);
}

/* Posts a request and waits for its completion. The peer sends no acknowledgment, so the request
 * succeeds even if it is lost. */
static void post(struct end *e, struct ibv_send_wr wr, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)e->buffer, length, e->mr->lkey };
	struct ibv_send_wr *bad;

	wr.sg_list = &sge;
	wr.num_sge = 1;
	wr.send_flags = IBV_SEND_SIGNALED;
	NEED(ibv_post_send(e->qp, &wr, &bad) == 0);
	CODE(IBV_WC_SUCCESS, next_completion(e).status);
}

static struct ibv_send_wr write_request(const struct end *peer, enum ibv_wr_opcode opcode,
	uint32_t imm)
{
	struct ibv_send_wr wr = { .opcode = opcode, .imm_data = htonl(imm) };

	wr.wr.rdma.remote_addr = (uintptr_t)peer->buffer;
	wr.wr.rdma.rkey = peer->mr->rkey;
	return wr;
}

static void test_lost_and_delivered_messages(struct end *a, struct end *b)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND };
	struct ibv_wc wc;

	/* Without a posted receive, both kinds of Send are lost. A Write with immediate data loses only
	 * its notification. */
	memset(a->buffer, 1, LENGTH);
	post(a, wr, LENGTH);
	wr.opcode = IBV_WR_SEND_WITH_IMM;
	post(a, wr, 10);
	memset(a->buffer, 2, LENGTH);
	post(a, write_request(b, IBV_WR_RDMA_WRITE_WITH_IMM, 1), 50);
	/* A Write with a wrong key is lost, including its immediate data. */
	wr = write_request(b, IBV_WR_RDMA_WRITE_WITH_IMM, 2);
	wr.wr.rdma.rkey ^= 0x1000;
	post(a, wr, LENGTH);
	/* The first Write's data must arrive. The pauses below give the peer time to process the
	 * messages after it, so that no receive is posted too early. */
	for (int left = TIMEOUT_MS; ((volatile char *)b->buffer)[49] != 2 && left; left--)
		usleep(1000);
	CHECK(b->buffer[0] == 2 && b->buffer[49] == 2 && b->buffer[50] == 0);
	for (int i = 0; i < 3; i++) {
		usleep(20000);
		CODE(0, ibv_poll_cq(b->cq, 1, &wc));
	}
	receive(b, 7, LENGTH);
	memset(a->buffer, 3, LENGTH);
	post(a, (struct ibv_send_wr){ .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = htonl(99) }, LENGTH);
	wc = next_completion(b);
	CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == 7 && wc.byte_len == LENGTH);
	CHECK(wc.wc_flags & IBV_WC_WITH_IMM && ntohl(wc.imm_data) == 99);
	CHECK(b->buffer[LENGTH - 1] == 3);
	receive(b, 8, 0);
	post(a, write_request(b, IBV_WR_RDMA_WRITE_WITH_IMM, 5), 20);
	wc = next_completion(b);
	CHECK(wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.byte_len == 20 && ntohl(wc.imm_data) == 5);
}

static void test_unsupported_operations(struct end *a, struct end *b)
{
	struct ibv_sge sge = { (uintptr_t)a->buffer, 8, a->mr->lkey };
	struct ibv_send_wr wr = write_request(b, IBV_WR_RDMA_READ, 0), *bad;
	struct ibv_qp_init_attr plain = attributes(a->cq);
	struct ibv_qp_init_attr_ex ex = { .send_cq = a->cq, .recv_cq = a->cq, .cap = plain.cap,
		.qp_type = IBV_QPT_UC };
	struct ibv_qp *qp;

	wr.sg_list = &sge;
	wr.num_sge = 1;
	CODE(EINVAL, ibv_post_send(a->qp, &wr, &bad));
	CHECK(bad == &wr);
	wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
	CODE(EINVAL, ibv_post_send(a->qp, &wr, &bad));
	ex.pd = pd;
	ex.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	ex.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_READ;
	IS_NULL(EOPNOTSUPP, ibv_create_qp_ex(context, &ex));
	ex.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
	NEED((qp = ibv_create_qp_ex(context, &ex)));
	CODE(0, ibv_destroy_qp(qp));
	ex.qp_type = IBV_QPT_UD;
	IS_NULL(EOPNOTSUPP, ibv_create_qp_ex(context, &ex));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct end a = { 0 }, b = { 0 };

	NEED(list && list[0]);
	NEED((context = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	NEED((pd = ibv_alloc_pd(context)) && ibv_query_gid(context, 1, 0, &gid) == 0);
	create_end(&a);
	create_end(&b);
	test_unsupported_operations(&a, &b);
	move_to_rts(&a, &b);
	move_to_rts(&b, &a);
	test_lost_and_delivered_messages(&a, &b);
	memset(b.buffer, 0, LENGTH);
	memset(a.buffer, 0, LENGTH);
	test_lost_and_delivered_messages(&b, &a);
	destroy_end(&a);
	destroy_end(&b);
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	return result();
}
