"""An order and its tasks in one transaction: both, or neither."""

import os

from celery import Celery
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from celery_native_delay import Delay, in_transaction, install
from celery_native_delay.clock import Clock

URL = os.environ.get("DATABASE_URL", "postgresql+psycopg://localhost/shop")
app = Celery("shop", broker=os.environ.get("BROKER_URL", "amqp://"))
install(app, store=URL)  # orders and waiting tasks are tables of one database
engine = create_engine(URL)
mails = []


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]


@app.task(name="shop.thank")
def thank(email):
    mails.append(email)


def place(email, charge):
    with Session(engine) as session, in_transaction(app, session):
        session.add(Order(email=email))
        thank.apply_async((email,), countdown=3 * 86400)
        charge(email)  # if this raises, there is neither an order nor a mail
        session.commit()


def refuse(email):
    raise ValueError("card declined")


def test_a_declined_card_leaves_no_mail():
    Base.metadata.create_all(engine)
    try:
        place("eve@example.com", charge=refuse)
    except ValueError:
        assert Delay(app).count() == 0
    place("ada@example.com", charge=print)
    assert [task.args for task in Delay(app).ls()] == ["('ada@example.com',)"]


def test_the_mail_comes_after_three_days():
    with Clock(app) as clock:
        thank.apply_async(("ada@example.com",), countdown=3 * 86400)
        clock.advance(days=3)
    assert mails == ["ada@example.com"]
